(** The second invariant of the system: some rank has work in every step, there is a cause for every report, an epoch is complete only
    when nothing is left to do, and the global counts are the true sums. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts.
Import ListNotations.

Lemma failure_not_complete : forall rs, failure_of rs <> Some Complete.
Proof.
  intros rs. unfold failure_of. assert (A : forall l, first_failed l <> Some Complete).
  { induction l as [|r l IH]; simpl; [discriminate|]. destruct (r_cause r); [discriminate|exact IH]. }
  destruct (first_failed rs) as [o|] eqn:E; [intros X; injection X as ->; apply (A rs E)|].
  destruct rs as [|r rs]; [discriminate|]. generalize (r :: rs). induction l as [|x l IH]; simpl; [discriminate|]. destruct (_ && _); [exact IH|discriminate].
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
  intros f n q H. unfold sum_counts. rewrite fold_add_samples. simpl. assert (X : In q (seq 0 n)) by (apply in_seq; lia). clear H.
  induction (seq 0 n) as [|i l IH]; simpl in *; [easy|]. destruct X as [->|X]; [lia|]. specialize (IH X). lia.
Qed.

Section Keeps.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).
Notation invariant := (System.invariant W cfg depth input).
Notation step := (System.step W cfg depth input).
Notation hist_of := (System.hist_of cfg).
Notation whole := (Facts.whole cfg).
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

Definition planned_samples (h : hist) (n : nat) : nat := sum_nat (map (fun x => n_samples (snd x)) (firstn n (h_steps h))).

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

Lemma second_start : second (start cfg).
Proof.
  constructor; simpl; try discriminate; try constructor; try lia. intros j x H. destruct j; discriminate.
Qed.

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
  pose proof (answer_or_own e) as Cases.
  destruct Cases as [[y ->]|NG].
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
    + destruct (failure_of rs); [|discriminate]. injection E as <-.
      rewrite drain_steps. reflexivity.
  - pose proof (transition_same _ _ _ _ _ _ NG E) as X. unfold groups_of. rewrite (sa_steps _ _ X), (sa_aligned _ _ X). reflexivity.
Qed.

Lemma rank_keeps_failure : forall s r e t, invariant s -> r < W ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t -> failure (rank_of s r) <> None -> failure t = failure (rank_of s r).
Proof.
  intros s r e t I H E F.
  pose proof (answer_or_own e) as Cases.
  destruct Cases as [[y ->]|NG]; [|apply (sa_failure _ _ (transition_same _ _ _ _ _ _ NG E) F)].
  simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:P; try discriminate.
  - apply (agree_cases _ _ _ _ _ _ E).
  - apply (count_cases _ _ _ _ _ E).
  - destruct (failure_of rs); [|discriminate]. injection E as <-. reflexivity.
Qed.

Lemma rank_step_keeps_second : forall s r e t s', invariant s -> invariant s' -> second s -> r < W -> may cfg input s r e ->
  transition (cfg r) r (depth r) (rank_of s r) e = Some t -> rank_of s' = update (rank_of s) r t -> log s' = log s -> second s'.
Proof.
  intros s r e t s' I I' S H M E Er El.
  assert (Wh' : whole s' = whole s) by (unfold Facts.whole, results; rewrite El; reflexivity).
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
      * destruct (failure_of rs); [|discriminate]. injection E as <-. exfalso. match type of P with at_phase (drain ?d ?o ?l ?u) = _ => destruct (drain_phase d o l u) as [P2|P2]; congruence end.
    + pose proof (own_event_reports _ _ _ _ _ _ NG E P) as P0.
      destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 _]. destruct S1 as [S2 S3]; [unfold is_waiting; rewrite P0; reflexivity|]. rewrite S3. apply F2, P0.
  - intros l HC. assert (D : forall q, q < W -> dry s q -> dry s' q).
    { intros q Hq [D1 [D2 D3]]. destruct (Nat.eq_dec q r) as [->|NE]; [|unfold dry; rewrite (Rq q NE); auto]. unfold dry. rewrite Rr.
      destruct Cases as [[y ->]|NG].
      - destruct (Kt y eq_refl) as [K1 [_ Wh]]. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K1)) as P1. rewrite HC in P1.
        pose proof (answer_keeps_ended _ _ _ _ _ _ E) as En.
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
  intros s cs I P R. destruct (reduce_counted _ _ R) as [l [Em [Fl [a0 [l0 [El Ec]]]]]].
  assert (X : forall r, r < W -> at_phase (rank_of s r) = COUNT /\ nth_error l r = Some (map count_group (aligned (rank_of s r)))).
  { intros r H. pose proof (messages_nth W s r H) as Hm. rewrite Em in Hm. destruct (nth_error l r) as [c|] eqn:Hc.
    - rewrite (map_nth_error MCounts _ _ Hc) in Hm. injection Hm as Hm.
      destruct (pending_current W cfg depth input s r I H (P r H)) as [_ [_ Wa]]. pose proof (waiting_says _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Wa) as Sa.
      rewrite <- Hm in Sa. destruct Sa as [Ph ->]. auto.
    - exfalso. apply nth_error_None in Hc. assert (W <= length l) by (rewrite <- (messages_length W s), Em, map_length; lia).
      assert (length (map MCounts l) = length l) by apply map_length. rewrite <- Em, messages_length in H1. lia. }
  assert (Ll : length l = W) by (rewrite <- (map_length MCounts), <- Em; apply messages_length).
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
    { rewrite Eq, map_map. apply map_ext. intros q. symmetry. apply nth_map_group. }
    rewrite Em2, El. simpl. rewrite add_counts_zero. reflexivity.
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
    assert (Hs : h_steps (whole s') = h_steps (whole s)).
    { rewrite Wh. unfold h_step. rewrite Hk. destruct (is_bad a); [reflexivity|]. destruct (o_stop_rank a); reflexivity. }
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
      * right. rewrite firstn_app, firstn_all2 by lia. rewrite map_app, sum_nat_app, firstn_make_shared, make_shared_samples, firstn_firstn.
        replace (Nat.min (m - length (h_steps (whole s))) n) with (m - length (h_steps (whole s))) by lia.
        unfold is_quota_met. destruct (c_quota (cfg 0)) as [Q|] eqn:EQ; [|reflexivity]. apply Nat.leb_gt.
        destruct (cut_at_first Q cs (h_samples (whole s)) (m - length (h_steps (whole s)))) as [Z|Z]; [unfold n, cut in Hm; rewrite EQ in Hm; lia|lia|exact Z].
    + intros j x Hx. rewrite Tr. apply Truth, Hx.
  - assert (Hs : h_steps (whole s') = h_steps (whole s)) by (rewrite Wh; unfold h_step; rewrite Hk; destruct (failure_of rs); reflexivity).
    constructor; try rewrite Hs; try apply S.
    + intros t Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (failure_of rs); [discriminate|congruence].
    + intros _. apply (n_report s S Hk).
    + intros l Ht. rewrite Wh in Ht. unfold h_step in Ht. rewrite Hk in Ht. destruct (failure_of rs) as [o|] eqn:F; [|congruence]. simpl in Ht. injection Ht as -> _.
      exfalso. apply (failure_not_complete rs F).
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

Lemma reachable_second : forall s, reachable s -> invariant s /\ second s.
Proof.
  induction 1 as [|s l t R [I S] St].
  - split; [destruct ok; eapply initial_invariant; eauto|apply second_start].
  - eapply step_keeps_second; eauto.
Qed.

End Keeps.
