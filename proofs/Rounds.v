(** TERM, sharper in join mode: an epoch has no more rounds than the largest shard has samples. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination.
Import ListNotations.

Section Rounds.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
(** Every round forms steps. *)
Hypothesis plain : forall r, r < W -> c_updates (cfg r) = None.
(** An alignment carries only surplus groups. *)
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].
Notation reachable := (System.reachable W cfg depth input).
Notation whole := (Facts.whole cfg).

Definition made (s : state) : nat := length (samples_of (steps_of s)) + length (concat (aligned s)).

(** A rank plans at least one sample in each round as long as it has any. *)
Record busy (n : nat) (s : state) : Prop := {
  b_work : 1 <= length (concat (aligned s)) -> round s + in_count s <= made s;
  b_left : round s + in_count s <= made s \/ made s = n }.

Lemma reachable_busy : forall s, reachable s -> forall r, r < W -> busy (length (input r)) (rank_of s r).
Proof.
  apply (each_rank_always W cfg depth input ok (fun r _ u => busy (length (input r)) u)).
  - intros r H. constructor; rewrite initial_in_count; unfold made; simpl; lia.
  - intros s i e t R H My NG E [B1 B2]. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. pose proof (own_event_keeps_in_count _ _ _ _ _ _ NG E) as Ic.
    constructor; unfold made in *; rewrite Ic, (sa_round _ _ Sm), (sa_steps _ _ Sm), (sa_aligned _ _ Sm); assumption.
  - intros s i y t R H My E IH. pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I i H) as K. set (u := rank_of s i) in *. simpl in E.
    destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
    + destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]].
      pose proof (agree_round _ _ _ _ _ _ E) as Rr.
      assert (Au : aligned u = []) by (apply (k_aligned _ _ _ _ _ _ K); fold u; rewrite Ph; discriminate).
      destruct IH as [B1 B2]. unfold made, in_count in *. rewrite Ph, Au in *. simpl in B1, B2.
      assert (Dec : at_phase t = COUNT \/ at_phase t <> COUNT) by (destruct (at_phase t); auto; right; discriminate). destruct Dec as [Pt|Pt].
      2:{ destruct (S2 Pt) as [Sa _]. constructor; rewrite (not_in_count t Pt); unfold made; rewrite S1, Sa, Rr; simpl; lia. }
      destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
      destruct (answered_offer W cfg depth input s i a I H My Ph) as [o [os [A [Io [Po O]]]]]. fold u in Po, O.
      destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [Rw [R3 _]]].
      destruct (without_updates _ (plain i H)) as [Every [Eg [Es _]]]. rewrite Eg in R3. rewrite Es in Al, Ca. pose proof (a_round_that_forms_steps_has_one W cfg depth input ok s i a n (sound_of ok R) H My Ph B Sr Tg (Every _)) as Tn.
      pose proof (ok_group_perm _ (configs_ok _ _ ok i H) (budget u) (window u)) as Gp. pose proof (ok_group_nonempty _ (configs_ok _ _ ok i H) (budget u) (window u)) as Gn. rewrite <- R3 in Gp, Gn.
      pose proof (Permutation_length Gp) as Gl. pose proof (Permutation_length (k_cons _ _ _ _ _ _ K)) as Cl. fold u in Cl. rewrite Au in Cl. simpl in Cl. rewrite app_length, firstn_length in Cl.
      pose proof (k_read _ _ _ _ _ _ K) as Rdd. fold u in Rdd.
      assert (Wa : window u <> [] -> 1 <= length (concat (aligned t))).
      { intros Wn. rewrite Al. destruct (le_lt_dec n (length (concat (groups u)))) as [L|L].
        - pose proof (ok_align_work _ (configs_ok _ _ ok i H) (round u) (groups u) n (due_before (cfg i) u) Gn L) as F. apply concat_of_nonempty in F.
          rewrite (ok_align_length _ (configs_ok _ _ ok i H)) in F. lia.
        - pose proof (concat_of_nonempty _ Gn) as F. pose proof (surplus i (round u) (groups u) n (due_before (cfg i) u) H ltac:(lia)) as Sn.
          pose proof (Permutation_length (ok_align_perm _ (configs_ok _ _ ok i H) (round u) (groups u) n (due_before (cfg i) u))) as Pl. rewrite Sn, app_nil_r in Pl.
          rewrite Pl, Gl. destruct (window u); [easy|simpl; lia]. }
      constructor; unfold made, in_count; rewrite Pt, S1, Rr.
      * intros W1. destruct B2 as [B2|B2]; [lia|]. exfalso.
        pose proof (Permutation_length (ok_align_perm _ (configs_ok _ _ ok i H) (round u) (groups u) n (due_before (cfg i) u))) as Pl. rewrite app_length, <- Al in Pl. lia.
      * destruct (window u) as [|x w] eqn:Ew; [right|left].
        -- assert (En : ended u = true) by (destruct (more_unless_counting _ _ _ _ _ _ K) as [X|[X|X]]; [fold u; congruence|exact X|fold u in X; rewrite Ew, Rw in X; simpl in X; lia|rewrite Every in X; discriminate]).
           destruct (k_ended _ _ _ _ _ _ K En) as [Er _]. fold u in Er.
           pose proof (Permutation_length (ok_align_perm _ (configs_ok _ _ ok i H) (round u) (groups u) n (due_before (cfg i) u))) as Pl. rewrite app_length, <- Al in Pl. simpl in *. lia.
        -- specialize (Wa ltac:(discriminate)). destruct B2 as [B2|B2]; [lia|]. simpl in Cl. lia.
    + destruct (count_cases _ _ _ _ _ E) as [Lc [Al [_ [_ [Pt S1]]]]]. destruct (S1 (k_plan _ _ _ _ _ _ K Ph)) as [new [S2 [S3 _]]].
      destruct (join i H) as [_ J2]. assert (Cut : cut (cfg i) (gsum u) cs = length cs) by (unfold cut; rewrite J2; reflexivity). rewrite Cut, Lc, firstn_all in S3.
      destruct (count_budget _ _ _ _ _ E) as [_ Rr].
      assert (Mt : made t = made u).
      { unfold made. rewrite Al, S2. unfold samples_of. rewrite map_app, concat_app, app_length, S3. simpl. lia. }
      assert (Ic : in_count t = 0) by (unfold in_count; destruct Pt as [-> | ->]; reflexivity).
      destruct IH as [B1 B2]. unfold in_count in B1, B2. rewrite Ph in B1, B2. constructor; rewrite Mt, Ic, Rr; [rewrite Al; simpl; lia|lia].
    + destruct (failure_of rs) as [o|] eqn:F; [|discriminate]. injection E as <-.
      destruct IH as [B1 B2]. unfold in_count in B1, B2. rewrite Ph in B1, B2. constructor; unfold made in *; rewrite drained_is_not_in_count, drain_steps; assumption.
  - intros s r n la R H D [B1 B2]. constructor; assumption.
Qed.

Variable largest : nat.
Hypothesis shards : forall r, r < W -> length (input r) <= largest.

Lemma rounds_within_largest : forall s, reachable s -> h_round (whole s) <= largest.
Proof.
  induction 1 as [|s l t R IH St]; [simpl; lia|]. destruct (sound_of ok R) as [I S _].
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact IH| |exact IH..].
  rewrite whole_snoc. unfold h_step. destruct (h_kind (whole s)) eqn:Hk; destruct x as [a|cs|rs]; try exact IH.
  - destruct (is_bad a); [exact IH|]. destruct (o_stop_rank a); exact IH.
  - simpl. destruct (n_count _ _ _ S _ Hk) as [_ [[_ T1]|[T1 [q [Hq Wa]]]]]; [rewrite (proj1 (without_updates _ (plain 0 (some_rank _ _ ok)))) in T1; discriminate|].
    destruct (pending_counts W cfg depth input s cs I P Rd) as [X1 _]. destruct (X1 q Hq) as [Ph L].
    destruct (pending_current W cfg depth input s q I Hq (P q Hq)) as [Wq _]. pose proof (g_core _ _ _ _ _ I q Hq) as K. rewrite Wq in K.
    pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. rewrite Ph, Hk in Kk. destruct Kk as [Kk _]. injection Kk as Kk.
    destruct Wa as [[Ph' _]|[_ F]]; [congruence|]. apply concat_of_nonempty in F.
    pose proof (b_work _ _ (reachable_busy s R q Hq) ltac:(lia)) as B. unfold in_count in B. rewrite Ph in B. rewrite (k_round _ _ _ _ _ _ K) in B.
    pose proof (Permutation_length (k_cons _ _ _ _ _ _ K)) as C. rewrite !app_length, firstn_length in C. unfold made in B. specialize (shards q Hq). lia.
  - destruct (failure_of rs); exact IH.
Qed.

(** TERM: in join mode there are at most as many rounds as the largest shard has samples. There are at most two exchanges for each of
    these, and two more, for the closing agreement and reports. *)
Theorem join_mode_has_no_more_rounds_than_the_largest_shard_has_samples : forall s r, reachable s -> r < W ->
  round (rank_of s r) <= largest /\ length (log s) <= 2 * largest + 2.
Proof.
  intros s r R H. pose proof (rounds_within_largest s R) as B. destruct (d_rounds _ _ _ (sound_of ok R)) as [_ L].
  pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I r H) as K. rewrite (k_round _ _ _ _ _ _ K).
  destruct (whole_goes_on cfg fresh s r) as [_ G].
  assert (kind_ops (h_kind (whole s)) <= 2) by (destruct (h_kind (whole s)); simpl; lia). lia.
Qed.

End Rounds.
