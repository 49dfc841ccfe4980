(** What every step keeps of all ranks at once ([sound]), besides the invariant of System.v. The second invariant: some rank has work in
    every step, there is a cause for every report, an epoch is complete only when nothing is left to do, and the global counts are the
    true sums. The third: outcomes and reports have a reason, rounds and exchanges are bounded by steps, and trainers are in lockstep. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts.
Import ListNotations.

Lemma first_different_mismatch : forall rs ref o, first_different ref rs = Some o -> exists q, o = Mismatch q.
Proof. induction rs as [|x rs IH]; simpl; intros ref o H; [discriminate|]. destruct (_ && _); [eauto|]. injection H as <-. eauto. Qed.

Lemma failure_of_kind : forall rs o, failure_of rs = Some o -> match o with Failed _ _ | Mismatch _ => True | _ => False end.
Proof.
  assert (A : forall rs o, first_failed rs = Some o -> exists q c, o = Failed q c).
  { induction rs as [|x rs IH]; simpl; intros o E; [discriminate|]. destruct (r_cause x); [injection E as <-; eauto|auto]. }
  intros rs o E. unfold failure_of in E. destruct (first_failed rs) eqn:F; [injection E as <-; destruct (A _ _ F) as [q [c ->]]; exact Logic.I|].
  destruct rs as [|x rs]; [discriminate|]. apply first_different_mismatch in E as [q ->]. exact Logic.I.
Qed.

Lemma cut_at_first : forall q cs g n, n < cut_at q g cs -> n = 0 \/ g + total_samples (firstn n cs) < q.
Proof.
  induction cs as [|x cs IH]; simpl; intros g n H; [lia|]. destruct n as [|n]; [auto|]. right. destruct (q <=? g + n_samples x) eqn:E; [lia|].
  apply Nat.leb_gt in E. unfold total_samples in *. simpl. destruct (IH (g + n_samples x) n) as [->|F]; [lia|simpl; lia|lia].
Qed.

Lemma make_shared_nth : forall cs n rd j x, nth_error (make_shared n rd cs) j = Some x -> nth_error cs j = Some (snd x).
Proof. induction cs as [|y cs IH]; simpl; intros n rd j x H; [destruct j; discriminate|]. destruct j; simpl in *; [injection H as <-; reflexivity|eauto]. Qed.

Lemma firstn_make_shared : forall cs n rd k, firstn k (make_shared n rd cs) = make_shared n rd (firstn k cs).
Proof. induction cs as [|y cs IH]; simpl; intros n rd k; destruct k; simpl; auto. rewrite IH. reflexivity. Qed.

Lemma nth_firstn : forall (A : Type) (l : list A) d n j, j < n -> nth j (firstn n l) d = nth j l d.
Proof. induction l as [|x l IH]; intros d n j H; [rewrite firstn_nil; reflexivity|]. destruct n; [lia|]. destruct j; simpl; [reflexivity|]. apply IH. lia. Qed.

Lemma map_ext_seq : forall (A : Type) (f g : nat -> A) n, (forall i, i < n -> f i = g i) -> map f (seq 0 n) = map g (seq 0 n).
Proof. intros A f g n H. apply map_ext_in. intros i Hi. apply in_seq in Hi. apply H. lia. Qed.

Lemma not_in_count : forall s, at_phase s <> COUNT -> in_count s = 0.
Proof. intros s P. unfold in_count. destruct (at_phase s); congruence. Qed.

Lemma drained_is_not_in_count : forall d o l u, in_count (drain d o l u) = 0.
Proof. intros d o l u. apply not_in_count. destruct (drain_phase d o l u) as [-> | ->]; discriminate. Qed.

Lemma own_event_keeps_in_count : forall c r d u e t, (forall x, e <> Got x) -> transition c r d u e = Some t -> in_count t = in_count u.
Proof.
  intros c r d u e t NG E. unfold in_count. destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [|reflexivity].
  destruct (post_phase c r (moved d u e)) as [-> |[X ->]]; destruct (moved_phase d u e) as [Y|[Y Z]]; try rewrite Z in *; try rewrite Y in *; try rewrite X in *; reflexivity.
Qed.

Lemma own_event_reports : forall c r d u e t, (forall x, e <> Got x) -> transition c r d u e = Some t -> at_phase t = REPORT -> at_phase u = REPORT.
Proof.
  intros c r d u e t NG E P. destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [|exact P].
  destruct (post_phase c r (moved d u e)) as [X|[_ X]], (moved_phase d u e) as [Y|[_ Y]]; congruence.
Qed.

Lemma sum_counts_ge : forall (f : nat -> counts) n q, q < n -> n_samples (f q) <= n_samples (sum_counts (map f (seq 0 n))).
Proof.
  intros f n q H. unfold sum_counts. rewrite (fold_add n_samples) by reflexivity. simpl. assert (X : In q (seq 0 n)) by (apply in_seq; lia). clear H.
  induction (seq 0 n) as [|i l IH]; simpl in *; [easy|]. destruct X as [->|X]; [lia|]. specialize (IH X). lia.
Qed.

Section Keeps.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Context {h0 : origin}.
Notation invariant := (System.invariant W cfg depth input (h0 := h0)).
Notation step := (System.step W cfg depth input).
Notation hist_of := (System.hist_from cfg h0).
Notation whole := (Facts.whole_from cfg h0).
Notation quota_met := (Facts.quota_met cfg).

Definition worker (s : sys) (t q : nat) : Prop :=
  (at_phase (rank_of s q) = OFFER /\ (exists o, posted (rank_of s q) = Some (MOffer o) /\ o_ready o = true) /\
    has_steps (cfg q) (round (rank_of s q)) = true /\ t <= length (window (rank_of s q))) \/
  (at_phase (rank_of s q) = COUNT /\ Forall (fun g => g <> []) (aligned (rank_of s q))).

Definition failing (s : sys) (q : nat) : Prop :=
  failure (rank_of s q) <> None /\
  (at_phase (rank_of s q) = REPORT -> exists x, posted (rank_of s q) = Some (MReport x) /\ r_cause x <> None).

(** The rank holds nothing and awaits nothing, and its source has ended. *)
Definition dry (s : sys) (q : nat) : Prop := window (rank_of s q) = [] /\ wanted (rank_of s q) = 0 /\ ended (rank_of s q) = true.

Definition planned_samples (h : hist) (n : nat) : nat := sum_over (fun x => n_samples (snd x)) (firstn n (h_steps h)).

Definition true_counts (s : sys) (j : nat) : counts :=
  sum_counts (map (fun q => count_group (nth j (groups_of (rank_of s q)) [])) (seq 0 W)).

Record second (s : sys) : Prop := {
  n_count : forall t, h_kind (whole s) = NCount t -> quota_met (whole s) = false /\
    (t = 0 /\ has_steps (cfg 0) (h_round (whole s)) = false \/ 1 <= t /\ exists q, q < W /\ worker s t q);
  n_report : h_kind (whole s) = NReport -> (exists q, q < W /\ failing s q) \/ exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0);
  n_closed : forall l, h_kind (whole s) = NClosed Complete l ->
    quota_met (whole s) = true \/ (c_is_quota (cfg 0) = true /\ exists q, q < W /\ dry s q) \/ forall q, q < W -> dry s q;
  n_work : Forall (fun x => 1 <= n_samples (snd x)) (h_steps (whole s));
  n_first : forall n, n < length (h_steps (whole s)) -> n = 0 \/ is_quota_met (cfg 0) (planned_samples (whole s) n) = false;
  n_true : forall j x, nth_error (h_steps (whole s)) j = Some x -> snd x = true_counts s j }.

(** A rank's history determines its phase, up to FILL or OFFER and DRAIN or DONE. *)
Lemma phase_of_kind : forall c c0 h s, kind_ok c c0 h s ->
  match h_kind h with
  | NOffer => at_phase s = FILL \/ at_phase s = OFFER
  | NCount _ => at_phase s = COUNT
  | NReport => at_phase s = REPORT
  | NClosed _ _ => at_phase s = DRAIN \/ at_phase s = DONE
  end.
Proof.
  intros c c0 h s K. unfold kind_ok in K. destruct (at_phase s); destruct (h_kind h); try discriminate; auto;
  try (destruct K; discriminate); destruct K as [? [? [? ?]]]; discriminate.
Qed.

Lemma rank_step_after : forall s r e t, invariant s -> r < W -> may cfg input s r e ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
  core (cfg r) (cfg 0) r (input r) (next_hist (cfg 0) (hist_of s r) e) t.
Proof.
  intros s r e t I H M E. destruct ok as [SR CO PD]. pose proof (may_admissible W cfg depth input SR PD s r e I H M) as A.
  apply (every_transition_keeps_the_invariant_of_a_rank (cfg r) (cfg 0) r (depth r) (input r) (hist_of s r) (CO r H)
      (history_numbered _ _) _ e t (g_core _ _ _ _ _ I r H) (g_tight _ _ _ _ _ I r H) A E).
Qed.

Lemma rank_keeps_groups : forall s r e t j, invariant s -> r < W -> may cfg input s r e ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t -> j < length (h_steps (whole s)) ->
  nth j (groups_of t) [] = nth j (groups_of (rank_of s r)) [].
Proof.
  intros s r e t j I H M E L. pose proof (rank_step_after s r e t I H M E) as K.
  destruct (answer_or_own e) as [[y ->]|NG].
  - destruct (got_current W cfg depth input s r y I H M) as [_ [_ [Wh _]]]. simpl in K. rewrite <- Wh in K.
    assert (Ls : length (steps_of t) = length (h_steps (whole s))) by (rewrite <- (k_steps _ _ _ _ _ _ K), map_length; reflexivity).
    simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P; try discriminate; unfold groups_of.
    + destruct (agree_cases _ _ _ _ _ _ E) as [_ [S1 _]]. rewrite S1 in *. rewrite !app_nth1; [reflexivity| |]; rewrite map_length; lia.
    + destruct (count_cases _ _ _ _ _ E) as [Lc [Al [_ [_ [_ S1]]]]].
      pose proof (g_core _ _ _ _ _ I r H) as K0. destruct (S1 (k_plan _ _ _ _ _ _ K0 P)) as [new [S2 [S3 _]]].
      rewrite Al, app_nil_r, S2, map_app, S3. rewrite S2, app_length in Ls. rewrite <- (map_length s_group new), S3, firstn_length in Ls.
      destruct (lt_dec j (length (steps_of (rank_of s r)))) as [J|J].
      * rewrite !app_nth1 by (rewrite map_length; assumption). reflexivity.
      * rewrite !app_nth2 by (rewrite map_length; lia). apply nth_firstn. rewrite map_length. lia.
    + destruct (failure_of rs); [|discriminate]. injection E as <-. rewrite drain_steps. reflexivity.
  - pose proof (transition_same _ _ _ _ _ _ NG E) as X. unfold groups_of. rewrite (sa_steps _ _ X), (sa_aligned _ _ X). reflexivity.
Qed.

Lemma rank_keeps_failure : forall s r e t, invariant s -> r < W ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t -> failure (rank_of s r) <> None -> failure t = failure (rank_of s r).
Proof.
  intros s r e t I H E F.
  destruct (answer_or_own e) as [[y ->]|NG]; [|apply (sa_failure _ _ (transition_same _ _ _ _ _ _ NG E) F)].
  simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P; try discriminate.
  - apply (agree_cases _ _ _ _ _ _ E).
  - apply (count_cases _ _ _ _ _ E).
  - destruct (failure_of rs); [|discriminate]. injection E as <-. reflexivity.
Qed.

Lemma rank_step_keeps_second : forall s r e t s', invariant s -> invariant s' -> second s -> r < W -> may cfg input s r e ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t -> rank_of s' = update (rank_of s) r t -> log s' = log s -> second s'.
Proof.
  intros s r e t s' I I' S H M E Er El.
  assert (Wh' : whole s' = whole s) by (unfold Facts.whole_from, results; rewrite El; reflexivity).
  pose proof (rank_step_after s r e t I H M E) as K.
  pose proof (answer_or_own e) as Cases.
  assert (Kt : forall y, e = Got y -> core (cfg r) (cfg 0) r (input r) (whole s) t /\ is_waiting (rank_of s r) = true /\ whole s = h_step (cfg 0) (hist_of s r) y).
  { intros y ->. destruct (got_current W cfg depth input s r y I H M) as [_ [Wa [Wh _]]]. simpl in K. rewrite <- Wh in K. auto. }
  pose proof (g_core _ _ _ _ _ I r H) as K0.
  assert (Rr : rank_of s' r = t) by (rewrite Er; apply update_same).
  assert (Rq : forall q, q <> r -> rank_of s' q = rank_of s q) by (intros q NE; rewrite Er; apply update_other, NE).
  constructor; rewrite ?Wh'.
  - intros T HT. destruct (n_count s S T HT) as [T1 [T2|[T2 [q [Hq Wa]]]]]; (split; [exact T1|]); [left; exact T2|right]. split; [exact T2|]. exists q. split; [exact Hq|].
    destruct (Nat.eq_dec q r) as [->|NE]; [|unfold worker in *; rewrite (Rq q NE); exact Wa].
    unfold worker in *. rewrite Rr. destruct Cases as [[y ->]|NG].
    + destruct (Kt y eq_refl) as [K1 [Wt Wh]]. right. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K1)) as P1. rewrite HT in P1.
      split; [exact P1|]. pose proof (k_kind _ _ _ _ _ _ K1) as K2. unfold kind_ok in K2. rewrite P1, HT in K2. destruct K2 as [K2 _]. injection K2 as K2.
      destruct Wa as [[P [[o [Po Ro]] [Hs Lo]]]|[P Wa]].
      * simpl in E. rewrite P in E. destruct y as [a|cs|rs]; try discriminate. destruct (agree_cases _ _ _ _ _ _ E) as [C _].
        destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n _ _ _ _ P2 _ Al _]; try congruence.
        rewrite Al in *. rewrite (formed_length _ (configs_ok _ _ ok r H)) in K2 by congruence.
        destruct (k_offer _ _ _ _ _ _ K0 P) as [o' [Po' O]]. rewrite Po in Po'. injection Po' as <-.
        destruct (of_ready _ _ _ _ O Ro) as [_ [_ [R3 _]]]. unfold groups_at in R3. rewrite Hs in R3. unfold align_at. rewrite Hs, R3.
        apply (ok_align_work _ (configs_ok _ _ ok r H)); [apply (ok_group_nonempty _ (configs_ok _ _ ok r H))|].
        rewrite (Permutation_length (ok_group_perm _ (configs_ok _ _ ok r H) _ _)). lia.
      * exfalso. pose proof (k_kind _ _ _ _ _ _ K0) as K3. unfold kind_ok in K3. rewrite P in K3. destruct K3 as [K3 _].
        simpl in E. rewrite P in E. destruct y as [a|cs|rs]; try discriminate. rewrite Wh in HT. unfold h_step in HT. rewrite K3 in HT. discriminate.
    + pose proof (transition_steady _ _ _ _ _ _ NG E) as [S1 _]. pose proof (transition_same _ _ _ _ _ _ NG E) as X.
      destruct Wa as [[P Wa]|[P Wa]]; (destruct S1 as [S2 S3]; [unfold is_waiting; rewrite P; reflexivity|]); rewrite S2, ?S3; [left|right]; (split; [exact P|]).
      * rewrite (sa_round _ _ X). destruct Wa as [[o [Po Ro]] Wa]. destruct (k_offer _ _ _ _ _ _ K0 P) as [o' [Po' O]]. rewrite Po in Po'. injection Po' as <-.
        destruct (of_ready _ _ _ _ O Ro) as [_ [R2 _]]. rewrite (proj1 (sa_window _ _ X R2)). split; [eauto|exact Wa].
      * rewrite (sa_aligned _ _ X). exact Wa.
  - intros HR. destruct (n_report s S HR) as [[q [Hq [F1 F2]]]|D]; [|right; exact D]. left. exists q. split; [exact Hq|].
    destruct (Nat.eq_dec q r) as [->|NE]; [|unfold failing; rewrite (Rq q NE); split; assumption].
    unfold failing. rewrite Rr. pose proof (rank_keeps_failure s r e t I H E F1) as F3. split; [rewrite F3; exact F1|]. intros P.
    destruct Cases as [[y ->]|NG].
    + simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P0; try discriminate.
      * destruct (agree_cases _ _ _ _ _ _ E) as [C _]. destruct C as [_ _ Po _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n _ _ _ _ P2 _ _ _]; try congruence. eauto.
      * exfalso. destruct (count_cases _ _ _ _ _ E) as [_ [_ [_ [_ [[P2|P2] _]]]]]; congruence.
      * destruct (failure_of rs); [|discriminate]. injection E as <-. drains.
    + pose proof (own_event_reports _ _ _ _ _ _ NG E P) as P0.
      destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 _]. destruct S1 as [S2 S3]; [unfold is_waiting; rewrite P0; reflexivity|]. rewrite S3. apply F2, P0.
  - intros l HC. assert (D : forall q, q < W -> dry s q -> dry s' q).
    { intros q Hq [D1 [D2 D3]]. destruct (Nat.eq_dec q r) as [->|NE]; [|unfold dry; rewrite (Rq q NE); auto]. unfold dry. rewrite Rr.
      destruct Cases as [[y ->]|NG].
      - destruct (Kt y eq_refl) as [K1 [_ Wh]]. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K1)) as P1. rewrite HC in P1.
        pose proof (proj2 (proj2 (proj2 (proj2 (proj2 (answer_keeps _ _ _ _ _ _ E)))))) as En.
        simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P0; try discriminate.
        + destruct (agree_cases _ _ _ _ _ _ E) as [_ [_ [_ [_ A]]]]. destruct A as [_ [A1 A2]]; [destruct P1; congruence|]. rewrite A1, A2, En. auto.
        + exfalso. destruct (count_cases _ _ _ _ _ E) as [_ [_ [_ [_ [[P2|P2] _]]]]]; destruct P1; congruence.
        + destruct (failure_of rs); [|discriminate]. injection E as <-.
          exact (conj D1 (conj D2 D3)).
      - pose proof (transition_same _ _ _ _ _ _ NG E) as X. destruct (sa_window _ _ X D2) as [A1 A2]. rewrite A1, A2, (sa_ended _ _ X D3). auto. }
    destruct (n_closed s S l HC) as [Q|[[Q [q [Hq Dq]]]|Q]]; [left; exact Q|right; left; split; [exact Q|]; exists q; auto|right; right; auto].
  - apply (n_work s S).
  - apply (n_first s S).
  - intros j x Hx. rewrite (n_true s S j x Hx). unfold true_counts. f_equal. apply map_ext_seq. intros q Hq.
    destruct (Nat.eq_dec q r) as [->|NE]; [|rewrite (Rq q NE); reflexivity]. rewrite Rr. f_equal. symmetry.
    eapply rank_keeps_groups; eauto. apply nth_error_Some. congruence.
Qed.

(** The counts of an exchange that is about to complete. *)
Lemma pending_counts : forall s cs, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Counted cs) ->
  (forall r, r < W -> at_phase (rank_of s r) = COUNT /\ length (aligned (rank_of s r)) = length cs) /\
  (forall j, nth j cs zero_counts = sum_counts (map (fun q => count_group (nth j (aligned (rank_of s q)) [])) (seq 0 W))).
Proof.
  intros s cs I P R. destruct (reduce_is _ _ R) as [l [Em [Fl [a0 [l0 [El Ec]]]]]].
  destruct (each_has_said W s _ MCounts l Em) as [Ll Said].
  assert (X : forall r, r < W -> at_phase (rank_of s r) = COUNT /\ nth_error l r = Some (map count_group (aligned (rank_of s r)))).
  { intros r H. destruct (Said r H) as [c [Hc Hm]]. destruct (pending_current W cfg depth input s r I H (P r H)) as [_ [_ Wa]].
    pose proof (waiting_says _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Wa) as Sa. rewrite Hm in Sa. destruct Sa as [Ph ->]. auto. }
  assert (Eq : l = map (fun q => map count_group (aligned (rank_of s q))) (seq 0 W)).
  { apply nth_ext with (d := []) (d' := []); [rewrite map_length, seq_length; exact Ll|]. intros n Hn. rewrite Ll in Hn.
    destruct (X n Hn) as [_ Xn]. erewrite nth_error_nth by exact Xn. symmetry. apply nth_error_nth.
    apply (map_nth_error (fun q => map count_group (aligned (rank_of s q)))). apply nth_error_seq, Hn. }
  split.
  - intros r H. destruct (X r H) as [X1 X2]. split; [exact X1|]. rewrite Forall_forall in Fl. specialize (Fl _ (nth_error_In _ _ X2)). rewrite map_length in Fl. exact Fl.
  - intros j. rewrite El in Fl. inversion Fl as [|? ? F1 F2]; subst x l1.
    assert (Fa : Forall (fun c => length c = length a0) l0) by (eapply Forall_impl; [|exact F2]; simpl; intros; congruence).
    rewrite Ec, fold_lists_nth by exact Fa. unfold sum_counts.
    assert (Em2 : map (fun q => count_group (nth j (aligned (rank_of s q)) [])) (seq 0 W) = map (fun c => nth j c zero_counts) l).
    { rewrite Eq, map_map. apply map_ext. intros q. symmetry. exact (map_nth count_group _ [] j). }
    rewrite Em2, El. simpl. destruct (nth j a0 zero_counts). reflexivity.
Qed.

Lemma exchange_keeps_second : forall s x, invariant s -> second s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some x ->
  second (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s)).
Proof.
  intros s x I S P R. set (s' := mkSys _ _ _ _ _). assert (Wh : whole s' = h_step (cfg 0) (whole s) x) by (apply whole_snoc).
  assert (Cur : forall r, r < W -> core (cfg r) (cfg 0) r (input r) (whole s) (rank_of s r)).
  { intros r H. destruct (pending_current W cfg depth input s r I H (P r H)) as [<- _]. apply (g_core _ _ _ _ _ I r H). }
  pose proof (some_rank _ _ ok) as SR. pose proof (exchange_kind W cfg depth input ok s x I P R) as Hk.
  assert (Tr : forall j, true_counts s' j = true_counts s j) by reflexivity.
  destruct x as [a|cs|rs].
  - destruct (pending_offers W cfg depth input s a I P R) as [os [A [Em [X1 X2]]]].
    assert (Hs : h_steps (whole s') = h_steps (whole s)) by (rewrite Wh; apply only_sums_add_steps; discriminate).
    assert (Hq : quota_met (whole s') = quota_met (whole s)) by (unfold Facts.quota_met, h_samples; rewrite Hs; reflexivity).
    constructor; try rewrite Hs; try rewrite Hq; try apply S.
    + intros t Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (is_bad a) eqn:B; [discriminate|]. destruct (o_stop_rank a) eqn:Sr; [discriminate|]. simpl in Ht.
      destruct (target (cfg 0) a) as [|n] eqn:T; [discriminate|]. injection Ht as <-.
      destruct (good_agreement_facts W cfg depth input ok s a I P R B Sr) as [G1 [G2 [[q [Hq' [o [Po Mo]]]] _]]].
      destruct (G2 (proj1 (target_makes _ _ _ T))) as [Q Sa]. split; [exact Q|].
      pose proof (good_agreement_round W cfg depth input s a I P R B q Hq') as Rd.
      pose proof (good_agreement W cfg SR (prints_differ _ _ ok) _ _ q (exchange_entry _ _ _ _ s _ I P R) B Hq') as Same.
      assert (Hr : h_round (whole s') = o_round_min a) by (rewrite Wh, Rd, (k_round _ _ _ _ _ _ (Cur q Hq')); unfold h_step; rewrite Hk, B, Sr; reflexivity).
      rewrite Hr. destruct (has_steps (cfg 0) (o_round_min a)) eqn:Hst; [right|left; split; [exact (no_steps_unless_formed _ _ _ _ T eq_refl Hst)|reflexivity]].
      pose proof (target_within_bounds _ _ _ (ok_rule _ (configs_ok _ _ ok 0 ltac:(lia))) T Hst (Sa eq_refl)) as B2.
      split; [lia|]. exists q. split; [exact Hq'|]. left. simpl. destruct (G1 q Hq') as [o' [Po' [Ph [Ro [Wa [_ [_ Sm]]]]]]].
      rewrite Po in Po'. injection Po' as <-. split; [exact Ph|]. split; [eauto|]. rewrite <- Rd, Same. split; [exact Hst|].
      rewrite Q, Mo in Sm. destruct (k_offer _ _ _ _ _ _ (Cur q Hq') Ph) as [o' [Po' O]]. rewrite Po in Po'. injection Po' as <-.
      destruct (of_ready _ _ _ _ O Ro) as [_ [_ [R3 _]]].
      rewrite (held_is_window _ _ _ _ _ _ (configs_ok _ _ ok q Hq') (Cur q Hq') Ph Wa R3) in Sm by (rewrite Same, <- Rd; exact Hst). lia.
    + intros Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (is_bad a) eqn:B.
      2:{ destruct (o_stop_rank a); [discriminate|]. simpl in Ht. destruct (target (cfg 0) a); discriminate. }
      unfold is_bad in B. apply orb_true_iff in B as [B|B]; [apply orb_true_iff in B as [B|B]|].
      * left. destruct (o_failed a) as [q|] eqn:F; [|discriminate]. destruct (at_failed _ _ A q F) as [o [Ho Fo]]. destruct (X2 o Ho) as [r [H [Ph [Po O]]]].
        exists r. split; [exact H|]. split; [apply (of_failed _ _ _ _ O q Fo)|]. simpl. rewrite Ph. discriminate.
      * exfalso. apply negb_true_iff, Nat.eqb_neq in B. apply B.
        destruct (at_round_min _ _ A) as [o1 [H1 E1]]. destruct (at_round_max _ _ A) as [o2 [H2 E2]].
        destruct (X2 o1 H1) as [r1 [L1 [_ [_ O1]]]]. destruct (X2 o2 H2) as [r2 [L2 [_ [_ O2]]]].
        rewrite <- E1, <- E2. destruct (of_round _ _ _ _ O1) as [-> _]. destruct (of_round _ _ _ _ O2) as [_ ->].
        rewrite (k_round _ _ _ _ _ _ (Cur r1 L1)), (k_round _ _ _ _ _ _ (Cur r2 L2)). reflexivity.
      * right. apply negb_true_iff, Nat.eqb_neq in B.
        destruct (at_print_min _ _ A) as [o1 [H1 E1]]. destruct (at_print_max _ _ A) as [o2 [H2 E2]].
        destruct (X2 o1 H1) as [r1 [L1 [_ [_ O1]]]]. destruct (X2 o2 H2) as [r2 [L2 [_ [_ O2]]]].
        destruct (of_print _ _ _ _ O1) as [Q1 _]. destruct (of_print _ _ _ _ O2) as [_ Q2].
        destruct (Nat.eq_dec (c_print (cfg r1)) (c_print (cfg 0))) as [D|D]; [exists r2|exists r1]; split; auto. congruence.
    + intros l Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (is_bad a) eqn:B; [discriminate|]. destruct (o_stop_rank a) eqn:Sr; [discriminate|]. simpl in Ht.
      destruct (target (cfg 0) a) as [|n] eqn:T; [|discriminate].
      destruct (good_agreement_facts W cfg depth input ok s a I P R B Sr) as [G1 [G2 [_ [q [Hq' [o [Po Mo]]]]]]].
      destruct (quota_met (whole s)) eqn:Q; [left; reflexivity|right].
      assert (Dry : forall r, r < W -> forall o', posted (rank_of s r) = Some (MOffer o') -> o_samples_max o' = 0 -> dry s' r).
      { intros r H o' Po' Z. destruct (G1 r H) as [o2 [Po2 [Ph2 [_ [Wa [_ [_ L2]]]]]]]. rewrite Po' in Po2. injection Po2 as <-. rewrite Z in L2.
        destruct (held_nothing _ _ _ _ _ _ (Cur r H) ltac:(congruence) Wa (eq_sym L2)) as [E1 E2]. unfold dry. simpl. auto. }
      destruct (target_closes _ _ T) as [Z|[Qm Z]].
      * right. intros r H. destruct (G1 r H) as [o' [Po' [_ [_ [_ [L1 _]]]]]]. apply (Dry r H o' Po'). lia.
      * left. split; [exact Qm|]. exists q. split; [exact Hq'|]. apply (Dry q Hq' o Po). lia.
    + unfold planned_samples. rewrite Hs. apply (n_first s S).
  - destruct (pending_counts s cs I P R) as [X1 X2]. destruct (n_count s S _ Hk) as [T2 T1].
    assert (Wq : cs = [] \/ exists q, q < W /\ Forall (fun g => g <> []) (aligned (rank_of s q))).
    { destruct T1 as [[T1 _]|[_ [q [Hq Wa]]]]; [left; destruct cs; [reflexivity|discriminate]|right; exists q; split; [exact Hq|]].
      destruct (X1 q Hq) as [Pq _]; destruct Wa as [[Pq' _]|[_ Wa]]; [congruence|exact Wa]. }
    set (n := cut (cfg 0) (h_samples (whole s)) cs). assert (Ln : n <= length cs) by apply cut_le.
    assert (Hs : h_steps (whole s') = h_steps (whole s) ++ make_shared (length (h_steps (whole s))) (h_round (whole s)) (firstn n cs)) by (rewrite Wh; unfold h_step; rewrite Hk; reflexivity).
    assert (Hk' : h_kind (whole s') = NOffer) by (rewrite Wh; unfold h_step; rewrite Hk; reflexivity).
    assert (Truth : forall j x, nth_error (h_steps (whole s')) j = Some x -> snd x = true_counts s j).
    { intros j x Hx. rewrite Hs in Hx. destruct (lt_dec j (length (h_steps (whole s)))) as [J|J].
      - rewrite nth_error_app1 in Hx by exact J. apply (n_true s S j x Hx).
      - rewrite nth_error_app2 in Hx by lia. apply make_shared_nth in Hx.
        assert (J2 : j - length (h_steps (whole s)) < n).
        { assert (Z : nth_error (firstn n cs) (j - length (h_steps (whole s))) <> None) by congruence. apply nth_error_Some in Z. rewrite firstn_length in Z. lia. }
        apply nth_error_nth with (d := zero_counts) in Hx.
        rewrite nth_firstn in Hx by exact J2. rewrite <- Hx, X2. unfold true_counts. f_equal. apply map_ext_seq. intros r H. f_equal. unfold groups_of.
        assert (Lr : length (steps_of (rank_of s r)) = length (h_steps (whole s))) by (rewrite <- (k_steps _ _ _ _ _ _ (Cur r H)), map_length; reflexivity).
        rewrite app_nth2 by (rewrite map_length; lia). rewrite map_length, Lr. reflexivity. }
    constructor; try (rewrite Hk'; discriminate); try (intros ? X; rewrite Hk' in X; discriminate).
    + rewrite Hs. apply Forall_app. split; [apply (n_work s S)|]. apply Forall_forall. intros y Hy. apply In_nth_error in Hy as [j Hj].
      apply make_shared_nth in Hj. assert (Hj2 : j < length (firstn n cs)) by (apply nth_error_Some; congruence). rewrite firstn_length in Hj2.
      destruct Wq as [Wq|[q [Hq Wq]]]; [rewrite Wq in Hj2; simpl in Hj2; lia|].
      apply nth_error_nth with (d := zero_counts) in Hj. rewrite nth_firstn in Hj by lia. rewrite <- Hj, X2.
      eapply Nat.le_trans; [|apply (sum_counts_ge _ W q Hq)]. destruct (X1 q Hq) as [_ Lq].
      rewrite Forall_forall in Wq. assert (NE : nth j (aligned (rank_of s q)) [] <> []) by (apply Wq, nth_In; lia).
      destruct (nth j (aligned (rank_of s q)) []); [easy|simpl; lia].
    + intros m Hm. unfold planned_samples. rewrite Hs in *. rewrite app_length, make_shared_length, firstn_length in Hm.
      destruct (le_dec m (length (h_steps (whole s)))) as [J|J].
      * rewrite firstn_app. replace (m - length (h_steps (whole s))) with 0 by lia. simpl. rewrite app_nil_r.
        destruct (Nat.eq_dec m (length (h_steps (whole s)))) as [->|NE].
        -- rewrite firstn_all. right. exact T2.
        -- apply (n_first s S). lia.
      * right. rewrite firstn_app, firstn_all2 by lia. rewrite sum_over_app, firstn_make_shared, make_shared_samples, firstn_firstn.
        replace (Nat.min (m - length (h_steps (whole s))) n) with (m - length (h_steps (whole s))) by lia.
        unfold is_quota_met. destruct (c_quota (cfg 0)) as [Q|] eqn:EQ; [|reflexivity]. apply Nat.leb_gt.
        destruct (cut_at_first Q cs (h_samples (whole s)) (m - length (h_steps (whole s)))) as [Z|Z]; [unfold n, cut in Hm; rewrite EQ in Hm; lia|lia|exact Z].
    + intros j x Hx. rewrite Tr. apply Truth, Hx.
  - assert (Hs : h_steps (whole s') = h_steps (whole s)) by (rewrite Wh; apply only_sums_add_steps; discriminate).
    constructor; try rewrite Hs; try apply S.
    + intros t Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (failure_of rs); [discriminate|congruence].
    + intros _. apply (n_report s S Hk).
    + intros l Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (failure_of rs) as [o|] eqn:F; [|congruence]. simpl in Ht. injection Ht as -> _.
      exfalso. exact (failure_of_kind _ _ F).
    + unfold planned_samples. rewrite Hs. apply (n_first s S).
Qed.

Lemma none_draws_after_the_end : forall s r n la, invariant s -> r < W -> may_draw cfg input s r n la -> forall o l, h_kind (whole s) <> NClosed o l.
Proof.
  intros s r n la I H [_ [_ [_ [_ Ph]]]] o l Hk. pose proof (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I r H)) as K. unfold kind_ok in K.
  destruct (hist_cases W cfg depth input s r I H) as [[_ Wa]|[_ [_ [Wt [ms [x [_ [_ Wa]]]]]]]]; destruct Ph as [[Ph _]|[Ph _]]; rewrite Ph in K.
  - destruct K as [K _]. congruence.
  - congruence.
  - destruct K as [K _]. rewrite Wa in Hk. unfold h_step in Hk. rewrite K in Hk. destruct x; simpl in Hk; congruence.
  - unfold is_waiting in Wt. rewrite Ph in Wt. discriminate.
Qed.

Lemma step_keeps_second : forall s l t, invariant s -> second s -> step s l t -> invariant t /\ second t.
Proof.
  intros s l t I S St. assert (I' : invariant t) by (destruct ok; eapply every_step_keeps_the_invariant; eauto). split; [exact I'|].
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s r n la H D].
  - apply (rank_step_keeps_second s r e t _ I I' S H M E); reflexivity.
  - apply exchange_keeps_second; assumption.
  - destruct S. constructor; assumption.
  - destruct S. constructor; try assumption. intros l Hk. exfalso. exact (none_draws_after_the_end s r n la I H D _ _ Hk).
Qed.

(** ** The third invariant *)

Lemma first_failed_spec : forall rs, match first_failed rs with
  | Some o => exists r c, In r rs /\ r_cause r = Some c /\ o = Failed (r_rank r) c
  | None => forall r, In r rs -> r_cause r = None end.
Proof.
  induction rs as [|r rs IH]; simpl; [easy|]. destruct (r_cause r) as [c|] eqn:C; [eauto 8|]. destruct (first_failed rs).
  - destruct IH as [q [c [H1 H2]]]. eauto 8.
  - intros q [<-|H]; auto.
Qed.

Lemma first_different_some : forall rs ref r, In r rs -> r_print r <> r_print ref -> exists q, first_different ref rs = Some (Mismatch q).
Proof.
  induction rs as [|x rs IH]; simpl; intros ref r H D; [easy|]. destruct (_ && _) eqn:E; [|eauto]. apply andb_true_iff in E as [_ E]. apply Nat.eqb_eq in E.
  destruct H as [->|H]; [congruence|eauto].
Qed.

(** Every exchange is an agreement or sums of a round, or one of the last two of the epoch. *)
Definition kind_ops (k : kind) : nat := match k with NOffer => 0 | NCount _ => 1 | NReport => 1 | NClosed _ _ => 2 end.

(** Of [update_rounds] rounds in a row one forms steps. *)
Lemma a_round_adds_a_step_if_it_has_any : forall c k, 1 <= update_rounds c -> S k / update_rounds c <= k / update_rounds c + if has_steps c k then 1 else 0.
Proof.
  intros c k P. unfold has_steps. set (p := update_rounds c) in *. pose proof (Nat.div_mod (S k) p ltac:(lia)) as D. pose proof (Nat.mod_upper_bound (S k) p ltac:(lia)) as M.
  destruct (Nat.eqb_spec (S k mod p) 0) as [Z|Z].
  - destruct (S k / p) as [|q]; [lia|]. enough (q <= k / p) by lia. apply Nat.div_le_lower_bound; lia.
  - enough (S k / p <= k / p) by lia. apply Nat.div_le_lower_bound; lia.
Qed.

Lemma taken_changes : forall c r d s e t, transition c r d s e = Some t ->
  match e with StepTaken => exists x, taken t = taken s ++ [x] | _ => taken t = taken s end.
Proof.
  intros c r d s e t E. destruct (answer_or_own e) as [[x ->]|NG]; [apply (answer_keeps _ _ _ _ _ _ E)|].
  destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> D]]; destruct e; try discriminate; try reflexivity. destruct G as [x [q [Q _]]]. exists x. simpl. rewrite Q. reflexivity.
Qed.

Definition outcome_true (s : sys) (o : outcome_kind) : Prop :=
  match o with
  | Complete => True
  | Stopped q _ => q < W /\ stopped (rank_of s q) = true
  | Failed q c => q < W /\ failure (rank_of s q) = Some c
  | Mismatch _ => exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0)
  | Lost _ _ => False
  end.

Record third (s : sys) : Prop := {
  d_cause : forall r, r < W -> at_phase (rank_of s r) = REPORT ->
    exists x, posted (rank_of s r) = Some (MReport x) /\ forall c, r_cause x = Some c -> failure (rank_of s r) = Some c;
  d_outcome : forall o l, h_kind (whole s) = NClosed o l -> outcome_true s o;
  d_reasons : Forall (fun p => match snd p with Reported rs => failure_of rs <> None | _ => True end) (log s);
  d_rounds : h_round (whole s) / update_rounds (cfg 0) <= length (h_steps (whole s)) /\ length (log s) <= 2 * h_round (whole s) + kind_ops (h_kind (whole s));
  d_lockstep : forall r q, r < W -> q < W -> length (taken (rank_of s r)) <= length (taken (rank_of s q)) + if running s r then 1 else 0 }.

(** The reports of an exchange that is about to complete. *)
Lemma pending_reports : forall s rs, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Reported rs) ->
  length rs = W /\ forall r, r < W -> at_phase (rank_of s r) = REPORT /\ exists x, nth_error rs r = Some x /\ posted (rank_of s r) = Some (MReport x) /\ r_rank x = r /\ r_print x = c_print (cfg r).
Proof.
  intros s rs I P R. pose proof (reduce_is _ _ R) as Em. simpl in Em.
  destruct (each_has_said W s _ MReport rs Em) as [L Said]. split; [exact L|]. intros r H. destruct (Said r H) as [x [Hx Hm]].
  destruct (pending_current W cfg depth input s r I H (P r H)) as [_ [_ Wa]]. pose proof (waiting_says _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Wa) as Sa.
  rewrite Hm in Sa. destruct Sa as [Ph Sa]. split; [exact Ph|]. exists x. auto.
Qed.

(** Some report gives a reason, so the Python's PeerError in compute_failure is never raised. *)
Lemma reports_say : forall s rs, invariant s -> second s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Reported rs) ->
  exists o, failure_of rs = Some o /\
    ((exists r c, r < W /\ o = Failed r c /\ exists x, posted (rank_of s r) = Some (MReport x) /\ r_cause x = Some c) \/
     ((exists q, o = Mismatch q) /\ (exists q, q < W /\ c_print (cfg q) <> c_print (cfg 0)) /\ forall q, q < W -> failing s q -> False)).
Proof.
  intros s rs I S P R. destruct (pending_reports s rs I P R) as [L X]. pose proof (some_rank _ _ ok) as SR.
  pose proof (exchange_kind W cfg depth input ok s _ I P R) as Hk.
  unfold failure_of. pose proof (first_failed_spec rs) as F. destruct (first_failed rs) as [o|].
  - exists o. split; [reflexivity|]. left. destruct F as [x [c [Hx [Cx ->]]]]. apply In_nth_error in Hx as [r Hr].
    assert (H : r < W) by (rewrite <- L; apply nth_error_Some; congruence). destruct (X r H) as [_ [y [Hy [Po [Ry _]]]]]. rewrite Hr in Hy. injection Hy as <-.
    exists r, c. rewrite Ry. eauto 6.
  - assert (NF : forall q, q < W -> failing s q -> False).
    { intros q Hq [_ F2]. destruct (X q Hq) as [Ph [y [Hy [Po _]]]]. destruct (F2 Ph) as [y' [Po' C]]. rewrite Po in Po'. injection Po' as <-. apply C, F. eapply nth_error_In, Hy. }
    destruct (n_report _ S Hk) as [[q [Hq Fq]]|[q [Hq D]]]; [exfalso; eapply NF; eauto|].
    destruct (X 0 ltac:(lia)) as [_ [x0 [H0 [_ [_ P0]]]]]. destruct (X q Hq) as [_ [xq [Hxq [_ [_ Pq]]]]].
    destruct rs as [|r0 rs]; [simpl in L; lia|]. simpl in H0. injection H0 as ->.
    destruct (first_different_some (x0 :: rs) x0 xq) as [i Hi]; [eapply nth_error_In, Hxq|congruence|]. rewrite Hi. exists (Mismatch i). split; [reflexivity|]. right. eauto 8.
Qed.

Lemma stopped_stays : forall c r d s e t, transition c r d s e = Some t -> stopped s = true -> stopped t = true.
Proof.
  intros c r d s e t E St. destruct (answer_or_own e) as [[x ->]|NG]; [destruct (answer_keeps _ _ _ _ _ _ E) as [_ [-> _]]; exact St|].
  destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [destruct e; auto|exact St].
Qed.

Lemma outcome_stays : forall s s' o, (forall q, q < W -> stopped (rank_of s q) = true -> stopped (rank_of s' q) = true) ->
  (forall q, q < W -> failure (rank_of s q) <> None -> failure (rank_of s' q) = failure (rank_of s q)) -> outcome_true s o -> outcome_true s' o.
Proof.
  intros s s' o H1 H2 O. destruct o as [|q n|q c|q|p c]; simpl in *; auto; destruct O as [O1 O2]; split; auto. rewrite H2; congruence.
Qed.

(** A trainer leaves a step only when every rank's consumer has taken it (A5). *)
Lemma step_keeps_lockstep : forall s l t, step s l t -> (forall r q, r < W -> q < W -> length (taken (rank_of s r)) <= length (taken (rank_of s q)) + if running s r then 1 else 0) ->
  forall r q, r < W -> q < W -> length (taken (rank_of t r)) <= length (taken (rank_of t q)) + if running t r then 1 else 0.
Proof.
  intros s l t St IH r q Hr Hq. specialize (IH r q Hr Hq) as Rq.
  destruct St as [s i e t Hi M E|s x P Rd|s i Hi Ru Tk|s d m la Hd Dr]; simpl.
  - apply taken_changes in E. destruct (match e with StepTaken => true | _ => false end) eqn:B.
    + destruct e; try discriminate. simpl in M. destruct E as [x E]. specialize (IH i q Hi Hq) as Iq. rewrite M in Iq.
      unfold update. destruct (r =? i) eqn:Ri, (q =? i) eqn:Qi; try (apply Nat.eqb_eq in Ri; subst r); try (apply Nat.eqb_eq in Qi; subst q); rewrite ?E, ?app_length; simpl; lia.
    + assert (G : forall j, length (taken (update (rank_of s) i t j)) = length (taken (rank_of s j))).
      { intros j. unfold update. destruct (j =? i) eqn:Ji; [|reflexivity]. apply Nat.eqb_eq in Ji. subst j. destruct e; try discriminate; rewrite E; reflexivity. }
      rewrite !G. destruct e; try discriminate; exact Rq.
  - exact Rq.
  - unfold update. destruct (r =? i) eqn:Ri; [|exact Rq]. apply Nat.eqb_eq in Ri. subst r. specialize (Tk q Hq). lia.
  - exact Rq.
Qed.

Lemma step_keeps_third : forall s l t, invariant s -> second s -> third s -> step s l t -> third t.
Proof.
  intros s l t I S IH St. pose proof (step_keeps_lockstep s l t St (d_lockstep s IH)) as Lk. destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [| |destruct IH; constructor; assumption..].
  - set (s' := mkSys _ _ _ _ _). assert (Ks : forall q, q < W -> stopped (rank_of s q) = true -> stopped (rank_of s' q) = true).
    { intros q Hq Sq. simpl. destruct (Nat.eq_dec q r) as [->|NE]; [rewrite update_same; eapply stopped_stays; eauto|rewrite update_other by assumption; exact Sq]. }
    assert (Kf : forall q, q < W -> failure (rank_of s q) <> None -> failure (rank_of s' q) = failure (rank_of s q)).
    { intros q Hq Fq. simpl. destruct (Nat.eq_dec q r) as [->|NE]; [rewrite update_same; eapply rank_keeps_failure; eauto|rewrite update_other by assumption; reflexivity]. }
    constructor; [| |apply (d_reasons s IH)|apply (d_rounds s IH)|exact Lk].
    + intros q Hq Ph. simpl in *. destruct (Nat.eq_dec q r) as [->|NE]; [rewrite update_same in *|rewrite update_other in * by assumption; apply (d_cause s IH q Hq Ph)].
      pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
      * simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P0; try discriminate.
         -- destruct (agree_cases _ _ _ _ _ _ E) as [C [_ [Fe _]]]. destruct C as [_ _ Po _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n _ _ _ _ P2 _ _ _]; try congruence.
            eexists. split; [exact Po|]. simpl. intros c Hc. rewrite Fe. exact Hc.
         -- exfalso. destruct (count_cases _ _ _ _ _ E) as [_ [_ [_ [_ [[P2|P2] _]]]]]; congruence.
         -- destruct (failure_of rs); [|discriminate]. injection E as <-. drains.
      * pose proof (own_event_reports _ _ _ _ _ _ NG E Ph) as P0.
         destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 _]. destruct S1 as [_ S3]; [unfold is_waiting; rewrite P0; reflexivity|].
         destruct (d_cause s IH r H P0) as [x [Po C]]. exists x. split; [congruence|]. intros c Hc. specialize (C c Hc). rewrite <- C.
         apply (sa_failure _ _ (transition_same _ _ _ _ _ _ NG E)). congruence.
    + intros o l Hk. apply (outcome_stays s); [exact Ks|exact Kf|]. eapply (d_outcome s IH). exact Hk.
  - pose proof (exchange_kind W cfg depth input ok s x I P Rd) as K0. constructor; [apply (d_cause s IH)|intros o l Hk; rewrite whole_snoc in Hk|apply Forall_app; split; [apply (d_reasons s IH)|]| |exact Lk].
    + assert (Os : forall o, outcome_true s o -> outcome_true (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s)) o) by (intros o'; destruct o'; simpl; auto).
      apply Os. clear Os. unfold h_step in Hk. rewrite K0 in Hk. destruct x as [a|cs|rs].
      * destruct (is_bad a); [discriminate|]. destruct (o_stop_rank a) as [q|] eqn:Sr.
        -- simpl in Hk. injection Hk as <- _. destruct (pending_offers W cfg depth input s a I P Rd) as [os [A [_ [_ X2]]]].
           destruct (at_stop _ _ A q Sr) as [o1 [Ho So]]. destruct (X2 o1 Ho) as [r [H [_ [_ O]]]]. destruct (of_stop _ _ _ _ O q So) as [-> St]. simpl. auto.
        -- simpl in Hk. destruct (target (cfg 0) a); [|discriminate]. injection Hk as <- _. exact Logic.I.
      * discriminate.
      * destruct (reports_say s rs I S P Rd) as [o1 [F Y]]. rewrite F in Hk. simpl in Hk. injection Hk as <- _.
        destruct Y as [[r [c [H [-> [x [Po Cx]]]]]]|[[q ->] [D _]]]; [|exact D]. simpl. split; [exact H|].
        destruct (pending_reports s rs I P Rd) as [_ X]. destruct (X r H) as [Ph _]. destruct (d_cause s IH r H Ph) as [x' [Po' C]]. rewrite Po in Po'. injection Po' as <-. auto.
    + constructor; [|constructor]. destruct x as [a|cs|rs]; simpl; auto. destruct (reports_say s rs I S P Rd) as [o [-> _]]. discriminate.
    + destruct (d_rounds s IH) as [R1 R2]. pose proof (ok_updates _ (configs_ok _ _ ok 0 (some_rank _ _ ok))) as Up. rewrite whole_snoc. simpl log. rewrite app_length. simpl length. unfold h_step. destruct x as [a|cs|rs].
      * rewrite K0 in *. simpl in R2. destruct (is_bad a); simpl; [lia|]. destruct (o_stop_rank a); simpl; [lia|]. destruct (target (cfg 0) a); simpl; lia.
      * destruct (n_count _ S _ K0) as [_ T1]. rewrite K0 in *. simpl in R2. cbn [h_round h_steps h_kind].
        rewrite app_length, make_shared_length, firstn_length.
        pose proof (a_round_adds_a_step_if_it_has_any (cfg 0) (h_round (whole s)) Up) as A. split; [|simpl; lia].
        pose proof (cut_pos (cfg 0) (h_samples (whole s)) cs) as C. pose proof (cut_le (cfg 0) (h_samples (whole s)) cs).
        destruct T1 as [[_ T1]|[T1 _]]; [rewrite T1 in A; lia|]. destruct cs; [simpl in T1; lia|]. specialize (C ltac:(discriminate)). destruct (has_steps _ _); simpl in *; lia.
      * rewrite K0 in *. simpl in R2. destruct (reports_say s rs I S P Rd) as [o [-> _]]. simpl. lia.
Qed.

(** Every step keeps a state sound. So what is proved of sound states is true wherever a run leads from one: from the start of an epoch
    ([sound_of]), or from where ranks were loaded ([Resume.v]). *)
Record sound (s : sys) : Prop := { so_invariant :> invariant s; so_second :> second s; so_third :> third s }.

Lemma step_keeps_sound : forall s l t, sound s -> step s l t -> sound t.
Proof.
  intros s l t [I S T] St. destruct (step_keeps_second s l t I S St) as [I' S'].
  constructor; [exact I'|exact S'|exact (step_keeps_third s l t I S T St)].
Qed.

Lemma leads_sound : forall s t, leads W cfg depth input s t -> sound s -> sound t.
Proof. induction 1 as [s|s t l u Ld IH St]; intros R; [exact R|exact (step_keeps_sound t l u (IH R) St)]. Qed.

End Keeps.

Lemma sound_of : forall {W cfg depth input}, setting_ok W cfg -> forall {s}, System.reachable W cfg depth input s -> sound W cfg depth input (h0 := fresh) s.
Proof.
  intros W cfg depth input ok s R. induction R as [|s l t R So St]; [|exact (step_keeps_sound W cfg depth input ok s l t So St)].
  constructor; [exact (initial_invariant W cfg depth input (some_rank _ _ ok) (configs_ok _ _ ok))|constructor; simpl; try discriminate; try constructor; try lia|constructor; [|discriminate|constructor| |]].
  - intros j x H. destruct j; discriminate.
  - intros r H P. change (at_phase (initial (cfg r) r) = REPORT) in P. destruct (initial_phase (cfg r) r); congruence.
  - pose proof (ok_updates _ (configs_ok _ _ ok 0 (some_rank _ _ ok))). simpl. rewrite Nat.div_0_l by lia. lia.
  - simpl. lia.
Qed.

