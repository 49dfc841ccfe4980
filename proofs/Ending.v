(** ABORT and STOP: an epoch that ends early ends on every rank, in one round, with one cause. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol.
Import ListNotations.

Section Ending.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).
Notation step := (System.step W cfg depth input).
Notation whole := (Facts.whole cfg).

Theorem failure_ends_all_ranks_in_the_same_round : forall {h0} s r q, Keeps.sound W cfg depth input (h0 := h0) s -> r < W -> q < W ->
  is_ending (rank_of s r) = true -> is_ending (rank_of s q) = true ->
  ended_as (rank_of s r) = ended_as (rank_of s q) /\ round (rank_of s r) = round (rank_of s q) /\
  length (released_of (rank_of s r)) = length (released_of (rank_of s q)).
Proof.
  intros h0 s r q R Hr Hq Er Eq. pose proof (so_invariant _ _ _ _ _ R) as I.
  destruct (ended_outcome W cfg depth input s r R Hr Er) as [o [l [Hk O1]]]. destruct (ended_outcome W cfg depth input s q R Hq Eq) as [o2 [l2 [Hk2 O2]]].
  rewrite Hk in Hk2. injection Hk2 as <- <-. split; [congruence|].
  destruct (ended_current W cfg depth input s r R Hr Er) as [Wr _]. destruct (ended_current W cfg depth input s q R Hq Eq) as [Wq _].
  pose proof (g_core _ _ _ _ _ I r Hr) as Kr. pose proof (g_core _ _ _ _ _ I q Hq) as Kq. rewrite Wr in Kr. rewrite Wq in Kq.
  rewrite (k_round _ _ _ _ _ _ Kr), (k_round _ _ _ _ _ _ Kq), (k_released _ _ _ _ _ _ Kr), (k_released _ _ _ _ _ _ Kq). auto.
Qed.

Theorem an_outcome_names_the_rank_and_the_cause : forall {h0} s r, Keeps.sound W cfg depth input (h0 := h0) s -> r < W -> is_ending (rank_of s r) = true ->
  exists o, ended_as (rank_of s r) = Some o /\ outcome_true W cfg s o.
Proof.
  intros h0 s r R H E. destruct (ended_outcome W cfg depth input s r R H E) as [o [l [Hk O]]]. exists o. split; [exact O|]. apply (d_outcome _ _ _ R o l Hk).
Qed.

Lemma an_offer_is_agreed_on : forall s t r o, reachable s -> step s LExchange t -> r < W -> at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) ->
  exists a os, agreement_of a os /\ In o os /\ h_kind (whole t) = (if is_bad a then NReport else match o_stop_rank a with
    | Some q => NClosed (Stopped q match o_stop_step a with Some n => n | None => 0 end) match o_stop_step a with Some n => n | None => 0 end
    | None => match target (cfg 0) a with Closes => NClosed Complete (length (h_steps (whole s))) | Makes n => NCount n end end).
Proof.
  intros s t r o R St H Ph Po. pose proof (invariant_of W cfg depth input ok s R) as I. inversion St as [|? x P Rd| |]; subst.
  destruct (pending_current W cfg depth input s r I H (P r H)) as [Wa _]. pose proof (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I r H)) as Kk. unfold kind_ok in Kk. rewrite Ph, Wa in Kk.
  pose proof (messages_nth W s r H) as Hm. unfold message in Hm. rewrite Po in Hm. pose proof (reduce_says _ _ _ Rd (nth_error_In _ _ Hm)) as Say.
  destruct x as [a|cs|rs]; [|destruct Say|destruct Say]. destruct Say as [os [_ [A Io]]]. exists a, os. split; [exact A|]. split; [exact Io|].
  rewrite whole_snoc. unfold h_step. rewrite Kk. destruct (is_bad a); [reflexivity|]. destruct (o_stop_rank a); reflexivity.
Qed.

Theorem a_failure_that_is_offered_ends_the_round : forall s t r o, reachable s -> step s LExchange t -> r < W ->
  at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) -> o_failed o <> None -> h_kind (whole t) = NReport.
Proof.
  intros s t r o R St H Ph Po Fo. destruct (an_offer_is_agreed_on s t r o R St H Ph Po) as [a [os [A [Io ->]]]].
  pose proof (ag_failed _ _ A o Io Fo) as Fa. unfold is_bad. destruct (o_failed a); [reflexivity|easy].
Qed.

(** ABORT: after an agreement that holds a failure or a mismatch, no rank completes the epoch. *)
Lemma bad_stays : forall s, reachable s -> (exists ms a, In (ms, Agreed a) (log s) /\ is_bad a = true) ->
  h_kind (whole s) = NReport \/ exists o l, h_kind (whole s) = NClosed o l /\
    ((exists q c, o = Failed q c) \/ ((exists q, o = Mismatch q) /\ exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0))).
Proof.
  induction 1 as [|s l t R IH St]; intros [ms [a [Hin B]]]; [destruct Hin|].
  destruct (sound_of ok R) as [I S _]. destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact (IH (ex_intro _ ms (ex_intro _ a (conj Hin B))))| |exact (IH (ex_intro _ ms (ex_intro _ a (conj Hin B))))|exact (IH (ex_intro _ ms (ex_intro _ a (conj Hin B))))].
  rewrite whole_snoc. simpl in Hin. apply in_app_or in Hin as [Hin|[Hin|[]]].
  - destruct (IH (ex_intro _ ms (ex_intro _ a (conj Hin B)))) as [K|[o [l [K O]]]]; unfold h_step; rewrite K.
    + destruct x as [a'|cs|rs]; auto. destruct (reports_say W cfg depth input ok s rs I S P Rd) as [o [F Y]]. rewrite F. right. exists o. eexists. split; [reflexivity|].
      destruct Y as [[r [c [_ [-> _]]]]|[Y1 [Y2 _]]]; [left; eauto|right; auto].
    + right. exists o, l. destruct x; auto.
  - injection Hin as _ Hin. left. rewrite Hin in *. unfold h_step. rewrite (exchange_kind W cfg depth input ok s _ I P Rd), B. reflexivity.
Qed.

Theorem an_offered_failure_is_the_outcome_of_every_rank : forall s r ms a, reachable s -> r < W ->
  In (ms, Agreed a) (log s) -> o_failed a <> None -> is_ending (rank_of s r) = true ->
  (exists q c, ended_as (rank_of s r) = Some (Failed q c) /\ q < W /\ failure (rank_of s q) = Some c) \/
  ((exists q, ended_as (rank_of s r) = Some (Mismatch q)) /\ exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0)).
Proof.
  intros s r ms a R H Hin F E. assert (B : is_bad a = true) by (unfold is_bad; destruct (o_failed a); [reflexivity|easy]).
  destruct (ended_outcome W cfg depth input s r (sound_of ok R) H E) as [o [l [Hk O]]]. rewrite O.
  destruct (bad_stays s R (ex_intro _ ms (ex_intro _ a (conj Hin B)))) as [K|[o' [l' [K Y]]]]; [congruence|]. rewrite Hk in K. injection K as <- <-.
  destruct Y as [[q [c ->]]|[[q ->] D]]; [left|right; eauto]. destruct (d_outcome _ _ s (sound_of ok R) _ _ Hk) as [Y1 Y2]. eauto.
Qed.

Theorem where_configurations_differ_every_rank_ends_as_failed_or_mismatch : forall s r, reachable s -> r < W -> is_ending (rank_of s r) = true ->
  (exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0)) ->
  (exists q c, ended_as (rank_of s r) = Some (Failed q c) /\ q < W /\ failure (rank_of s q) = Some c) \/ exists q, ended_as (rank_of s r) = Some (Mismatch q).
Proof.
  intros s r R H E [q [Hq D]]. pose proof (some_rank _ _ ok) as SR.
  assert (B : (exists ms a, In (ms, Agreed a) (log s) /\ is_bad a = true) \/ h_kind (whole s) = NOffer).
  { clear E H r. induction R as [|s l t R IH St]; [right; reflexivity|]. pose proof (invariant_of W cfg depth input ok s R) as I.
    destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact IH| |exact IH..]. destruct IH as [[ms [a [Hin B]]]|K]; [left; exists ms, a; split; [simpl; apply in_or_app; auto|exact B]|].
    destruct x as [a|cs|rs]; [left|right; rewrite whole_snoc; unfold h_step; rewrite K; exact K|right; rewrite whole_snoc; unfold h_step; rewrite K; exact K].
    exists (messages W s), a. split; [simpl; apply in_or_app; right; left; reflexivity|]. destruct (is_bad a) eqn:B; [reflexivity|exfalso]. apply D.
    rewrite (good_agreement W cfg SR (prints_differ _ _ ok) _ _ q (exchange_entry W cfg depth input s _ I P Rd) B Hq). reflexivity. }
  destruct (ended_outcome W cfg depth input s r (sound_of ok R) H E) as [o [l [Hk O]]]. rewrite O. destruct B as [B|K]; [|congruence].
  destruct (bad_stays s R B) as [K|[o' [l' [K Y]]]]; [congruence|]. rewrite Hk in K. injection K as <- <-.
  destruct Y as [[i [c ->]]|[[i ->] _]]; [left|right; eauto]. destruct (d_outcome _ _ s (sound_of ok R) _ _ Hk) as [Y1 Y2]. eauto.
Qed.

(** ABORT: FAILED names the lowest rank whose report has a cause. *)
Lemma failure_of_lowest : forall rs q c, (forall i x, nth_error rs i = Some x -> r_rank x = i) -> failure_of rs = Some (Failed q c) ->
  (exists x, nth_error rs q = Some x /\ r_cause x = Some c) /\ forall i x, i < q -> nth_error rs i = Some x -> r_cause x = None.
Proof.
  assert (X : forall rs n q c, (forall i x, nth_error rs i = Some x -> r_rank x = n + i) -> first_failed rs = Some (Failed q c) ->
    n <= q /\ (exists x, nth_error rs (q - n) = Some x /\ r_cause x = Some c) /\ forall i x, n + i < q -> nth_error rs i = Some x -> r_cause x = None).
  { induction rs as [|y rs IH]; intros n q c Rk F; simpl in F; [discriminate|]. pose proof (Rk 0 y eq_refl) as R0. destruct (r_cause y) as [c'|] eqn:C.
    - injection F as <- <-. rewrite R0, Nat.add_0_r. split; [lia|]. rewrite Nat.sub_diag. split; [exists y; auto|]. intros; lia.
    - destruct (IH (S n) q c) as [L [[x [Hx Cx]] M]]; [intros i x Hi; rewrite (Rk (S i) x Hi); lia|exact F|]. split; [lia|]. split.
      + exists x. replace (q - n) with (S (q - S n)) by lia. auto.
      + intros i z Li Hz. destruct i as [|i]; [simpl in Hz; congruence|]. apply (M i z); [lia|exact Hz]. }
  intros rs q c Rk F. unfold failure_of in F. destruct (first_failed rs) as [o|] eqn:E.
  - injection F as ->. destruct (X rs 0 q c Rk E) as [_ [Y Z]]. rewrite Nat.sub_0_r in Y. split; [exact Y|exact Z].
  - destruct rs as [|r rs]; [discriminate|]. apply first_different_mismatch in F as [i F]. discriminate.
Qed.

Theorem a_failure_names_the_lowest_rank_that_reports_a_cause : forall s r q c, reachable s -> r < W -> is_ending (rank_of s r) = true ->
  ended_as (rank_of s r) = Some (Failed q c) ->
  exists ms rs, In (ms, Reported rs) (log s) /\ length rs = W /\ (forall i x, nth_error rs i = Some x -> r_rank x = i) /\
    (exists x, nth_error rs q = Some x /\ r_cause x = Some c) /\ forall i x, i < q -> nth_error rs i = Some x -> r_cause x = None.
Proof.
  intros s r q c R H E O. destruct (ended_outcome W cfg depth input s r (sound_of ok R) H E) as [o [l [Hk O']]]. rewrite O in O'. injection O' as <-. clear O E H r.
  revert l Hk. induction R as [|s lb t R IH St]; intros l Hk; [discriminate|]. destruct (sound_of ok R) as [I S _].
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact (IH l Hk)| |exact (IH l Hk)..]. rewrite whole_snoc in Hk.
  unfold h_step in Hk. simpl. rewrite (exchange_kind W cfg depth input ok s x I P Rd) in Hk. destruct x as [a|cs|rs].
  - destruct (is_bad a); [discriminate|]. destruct (o_stop_rank a); [discriminate|]. simpl in Hk. destruct (target (cfg 0) a); discriminate.
  - discriminate.
  - destruct (failure_of rs) as [o|] eqn:Fo; [|destruct (reports_say W cfg depth input ok s rs I S P Rd) as [o [F _]]; congruence]. simpl in Hk. injection Hk as -> _.
    destruct (pending_reports W cfg depth input s rs I P Rd) as [L X]. assert (Rk : forall i x, nth_error rs i = Some x -> r_rank x = i).
    { intros i x Hx. assert (Hi : i < W) by (rewrite <- L; apply nth_error_Some; congruence). destruct (X i Hi) as [_ [y [Hy [_ [Ry _]]]]]. congruence. }
    exists (messages W s), rs. split; [apply in_or_app; right; left; reflexivity|]. split; [exact L|]. split; [exact Rk|]. apply failure_of_lowest; assumption.
Qed.

(** ABORT: a failed rank is never in FILL, because there it offers its failure at once. *)
Theorem a_failed_rank_offers_its_failure : forall s r, reachable s -> r < W -> failure (rank_of s r) <> None -> at_phase (rank_of s r) <> FILL.
Proof.
  intros s r R H F P. pose proof (t_fill _ _ (g_tight _ _ _ _ _ (invariant_of W cfg depth input ok s R) r H) P) as [M _]. unfold must_end in M.
  destruct (failure (rank_of s r)); [discriminate|easy].
Qed.

Theorem an_offer_says_what_befell_its_rank : forall c r d s e t, transition c r d s e = Some t -> at_phase s <> OFFER -> at_phase t = OFFER ->
  exists o, posted t = Some (MOffer o) /\ (failure t <> None -> o_failed o = Some r) /\
    (stopped t = true -> o_stop_rank o = Some r /\ o_stop_step o = Some (length (taken t))).
Proof.
  intros c r d s e t E Ps Pt.
  assert (Post : forall u, at_phase u <> OFFER -> at_phase (post c r u) = OFFER -> exists o, posted (post c r u) = Some (MOffer o) /\
    (failure (post c r u) <> None -> o_failed o = Some r) /\ (stopped (post c r u) = true -> o_stop_rank o = Some r /\ o_stop_step o = Some (length (taken (post c r u))))).
  { intros u Pu Pp. destruct (post_eq c r u) as [[Eq _]|[_ [_ ->]]]; [rewrite Eq in Pp; contradiction|]. simpl. eexists. split; [reflexivity|]. simpl. split.
    - destruct (failure u); [reflexivity|easy].
    - intros ->. auto. }
  destruct (answer_or_own e) as [[x ->]|NG].
  - simpl in E. destruct x as [a|cs|rs]; destruct (at_phase s); try discriminate; [contradiction Ps; reflexivity|destruct (count_eq _ _ _ _ _ E) as [_ ->]; apply Post; [discriminate|exact Pt]|].
    destruct (failure_of rs); [|discriminate]. injection E as <-. drains.
  - destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [|contradiction]. apply Post; [|exact Pt]. destruct (moved_phase d s e) as [-> |[_ ->]]; [exact Ps|discriminate].
Qed.

(** A field reduced by MIN is the least value offered. *)
Lemma fold_min : forall f : offer -> option nat, (forall a b, f (combine_offers a b) = min_opt (f a) (f b)) ->
  forall os o, match f (fold_left combine_offers os o) with
  | Some n => (exists x, In x (o :: os) /\ f x = Some n) /\ forall x k, In x (o :: os) -> f x = Some k -> n <= k
  | None => forall x, In x (o :: os) -> f x = None
  end.
Proof.
  intros f Hf os o. rewrite (fold_field f Hf). pose proof (fold_least (map f os) (f o)) as L. change (f o :: map f os) with (map f (o :: os)) in L.
  destruct (fold_left _ _ _) as [n|]; [destruct L as [I M]; split|intros x I; apply L, in_map, I].
  - apply in_map_iff in I as [x [E I]]. eauto.
  - intros x k I' E. apply M. rewrite <- E. apply in_map, I'.
Qed.

Definition least (f : offer -> option nat) (os : list offer) (n : nat) : Prop := (exists x, In x os /\ f x = Some n) /\ forall x k, In x os -> f x = Some k -> n <= k.

Theorem a_stop_names_the_lowest_rank_and_the_fewest_steps_offered : forall s r q n, reachable s -> r < W -> is_ending (rank_of s r) = true ->
  ended_as (rank_of s r) = Some (Stopped q n) ->
  exists os a, In (map MOffer os, Agreed a) (log s) /\ least o_stop_rank os q /\ least o_stop_step os n.
Proof.
  intros s r q n R H E O. destruct (ended_outcome W cfg depth input s r (sound_of ok R) H E) as [o [l [Hk O']]]. rewrite O in O'. injection O' as <-. clear O E H r.
  revert l Hk. induction R as [|s lb t R IH St]; intros l Hk; [discriminate|]. pose proof (invariant_of W cfg depth input ok s R) as I.
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact (IH l Hk)| |exact (IH l Hk)..]. rewrite whole_snoc in Hk.
  unfold h_step in Hk. simpl. pose proof (exchange_kind W cfg depth input ok s x I P Rd) as K. rewrite K in Hk. destruct x as [a|cs|rs]; [|discriminate|].
  - destruct (is_bad a); [discriminate|]. destruct (o_stop_rank a) as [q'|] eqn:Sr; [|simpl in Hk; destruct (target (cfg 0) a); discriminate].
    simpl in Hk. injection Hk as -> Hn _. destruct (reduce_is _ _ Rd) as [all [Em [_ [o0 [os [-> Ra]]]]]].
    exists (o0 :: os), a. split; [apply in_or_app; right; left; rewrite Em; reflexivity|].
    pose proof (fold_min o_stop_rank (fun _ _ => eq_refl) os o0) as F1.
    pose proof (fold_min o_stop_step (fun _ _ => eq_refl) os o0) as F2. rewrite <- Ra in F1, F2. rewrite Sr in F1.
    split; [exact F1|]. destruct (o_stop_step a) as [k|]; [subst k; exact F2|exfalso].
    destruct F1 as [[x [Hx Sx]] _]. specialize (F2 x Hx). apply In_nth_error in Hx as [i Hi].
    assert (Hm : nth_error (messages W s) i = Some (MOffer x)) by (rewrite Em; apply (map_nth_error MOffer i (o0 :: os) Hi)).
    assert (Li : i < W) by (rewrite <- (messages_length W s); apply nth_error_Some; congruence). rewrite messages_nth in Hm by exact Li. injection Hm as Hm.
    assert (Wa : is_waiting (rank_of s i) = true) by (apply (pending_current W cfg depth input s i I Li (P i Li))).
    pose proof (waiting_message W cfg depth input s i I Li Wa) as Ok. rewrite Hm in Ok. destruct Ok as [_ [_ [_ [_ [_ [_ Z]]]]]]. apply Z; congruence.
  - exfalso. destruct (failure_of rs) as [o|] eqn:Fo; [|congruence]. simpl in Hk. injection Hk as -> _. exact (failure_of_kind _ _ Fo).
Qed.

(** STOP: a rank whose consumer has stopped is never in FILL either, and the round in which the stop is offered is the last. A failure
    or a mismatch takes precedence (R7.4). *)
Theorem a_stopped_rank_offers_its_stop : forall s r, reachable s -> r < W -> stopped (rank_of s r) = true -> at_phase (rank_of s r) <> FILL.
Proof.
  intros s r R H F P. pose proof (t_fill _ _ (g_tight _ _ _ _ _ (invariant_of W cfg depth input ok s R) r H) P) as [M _]. unfold must_end in M.
  apply orb_false_iff in M as [_ M]. congruence.
Qed.

Theorem a_stop_that_is_offered_ends_the_round : forall s t r o, reachable s -> step s LExchange t -> r < W ->
  at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) -> o_stop_rank o <> None ->
  h_kind (whole t) = NReport \/ exists q n, h_kind (whole t) = NClosed (Stopped q n) n.
Proof.
  intros s t r o R St H Ph Po Fo. destruct (an_offer_is_agreed_on s t r o R St H Ph Po) as [a [os [A [Io ->]]]].
  pose proof (ag_stop _ _ A o Io Fo) as Fa. destruct (is_bad a); [left; reflexivity|right]. destruct (o_stop_rank a) as [q|]; [|easy]. simpl. eauto.
Qed.

End Ending.
