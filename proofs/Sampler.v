(** ORDER in the order sampler, for the whole system: a rank plans its input from the first sample on, in order. This holds for any
    grouping and alignment that keep samples in their order; those that ship are in Runs.v. *)
Require Import List Arith Lia Bool Permutation Sorted.
From ODB Require Import Lists Types Alignment Runs Machine Local Rank System Facts Keeps Age Loss.
Import ListNotations.

Section Sampler.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis grouped_in_order : forall r b w, r < W -> concat (c_group (cfg r) b w) = by_position w.
Hypothesis aligned_in_order : forall r k gs t d, r < W -> Forall (fun g => g <> []) gs -> rising (concat gs) ->
  concat (fst (c_align (cfg r) k gs t d)) ++ snd (c_align (cfg r) k gs t d) = concat gs.
Hypothesis input_in_order : forall r, r < W -> rising (input r).
Notation reachable := (System.reachable W cfg depth input).

(** What has been read, in the order in which it leaves. *)
Definition in_line (u : state) : list sample := samples_of (steps_of u) ++ concat (aligned u) ++ window u.

Lemma read_ascends : forall r n, r < W -> rising (firstn n (input r)).
Proof. intros r n H. pose proof (input_in_order r H) as A. rewrite <- (firstn_skipn n) in A. apply sorted_app in A as [A _]. exact A. Qed.

Lemma what_is_read_stays_in_line : forall s r, reachable s -> r < W -> in_line (rank_of s r) = firstn (read (rank_of s r)) (input r).
Proof.
  intros s r R. revert s R r. apply (each_rank_always W cfg depth input ok (fun r _ u => in_line u = firstn (read u) (input r)));
    [reflexivity|intros s i e t R H M NG E IH|intros s i y t R H M E IH|auto];
    pose proof (invariant_of W cfg depth input ok s R) as I; pose proof (may_admissible W cfg depth input (some_rank _ _ ok) (prints_differ _ _ ok) s i _ I H M) as Ad.
  { pose proof (transition_same _ _ _ _ _ _ NG E) as X. pose proof (aged_transition _ _ _ _ _ _ NG E) as A. unfold aged in A. injection A as _ Ar Aw _.
    unfold in_line in *. rewrite (sa_steps _ _ X), (sa_aligned _ _ X), Aw, Ar, firstn_add, <- IH, !app_assoc. f_equal.
    destruct e; simpl in *; try reflexivity. apply Ad. }
  rewrite (nothing_is_read_of_an_answer _ _ _ _ _ _ E). rewrite <- IH. pose proof (g_core _ _ _ _ _ I i H) as K.
  pose proof (read_ascends i (read (rank_of s i)) H) as As. rewrite <- IH in As. unfold in_line in *. simpl in E.
  destruct y as [a|cs|ps]; destruct (at_phase (rank_of s i)) eqn:Ph; try discriminate.
  - destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]]. rewrite S1. f_equal.
    destruct C as [Ba P2 _ _|q Ba Sr P2 _|Ba Sr Ra Tg P2 _|n Ba Sr Ra Tg Pt _ Al Wi];
      try (destruct S2 as [-> [-> _]]; [|reflexivity]; first [congruence|destruct P2; congruence]).
    destruct Ad as [_ Ad]. destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po O]]. destruct (of_ready _ _ _ _ O (Ad Ra o Po)) as [_ [_ [G _]]].
    assert (A0 : aligned (rank_of s i) = []) by (apply (k_aligned _ _ _ _ _ _ K); congruence). rewrite A0 in *. simpl in *.
    apply sorted_app in As as [_ [As _]]. rewrite Al, Wi. unfold groups_at in G. unfold align_at. destruct (has_steps (cfg i) (round (rank_of s i))); [|reflexivity].
    assert (E0 : concat (groups (rank_of s i)) = window (rank_of s i)) by (rewrite G, grouped_in_order by exact H; apply by_position_once; [exact As|reflexivity]).
    rewrite aligned_in_order; [exact E0|exact H| |rewrite E0; exact As]. rewrite G. apply (ok_group_nonempty _ (configs_ok _ _ ok i H)).
  - destruct (count_cases _ _ _ _ _ E) as [_ [Al [_ [_ [_ New]]]]]. destruct (New (k_plan _ _ _ _ _ _ K Ph)) as [new [S1 [S2 _]]].
    pose proof (held_count _ _ _ _ _ E) as Hd. unfold held in Hd. injection Hd as Hd _ _ _. rewrite S1, Al, Hd. unfold samples_of. rewrite map_app, concat_app, S2.
    set (n := cut (cfg i) (gsum (rank_of s i)) cs) in *. rewrite <- app_assoc. f_equal. simpl.
    assert (Ea : concat (aligned (rank_of s i)) = concat (firstn n (aligned (rank_of s i))) ++ concat (skipn n (aligned (rank_of s i))))
      by (rewrite <- concat_app, firstn_skipn; reflexivity).
    rewrite Ea in As |- *. rewrite <- app_assoc in As |- *. f_equal.
    apply sorted_app in As as [_ [As _]]. apply sorted_app in As as [_ [As _]].
    destruct (concat (skipn n (aligned (rank_of s i)))) as [|y back]; [reflexivity|]. cbn [is_nil]. apply by_position_once; [exact As|apply Permutation_app_comm].
  - destruct (failure_of ps) as [o|]; [|discriminate]. injection E as <-.
    rewrite drain_steps. reflexivity.
Qed.

Theorem in_the_order_sampler_everything_stays_in_line : forall s r, reachable s -> r < W ->
  samples_of (steps_of (rank_of s r)) ++ concat (aligned (rank_of s r)) ++ window (rank_of s r) ++ skipn (read (rank_of s r)) (input r) = input r.
Proof.
  intros s r R H. pose proof (what_is_read_stays_in_line s r R H) as E. unfold in_line in E. rewrite <- (firstn_skipn (read (rank_of s r)) (input r)) at 2.
  rewrite <- E, <- !app_assoc. reflexivity.
Qed.

Theorem in_the_order_sampler_the_steps_are_the_first_of_the_input : forall u r, lossy_reachable W cfg depth input u -> r < W ->
  samples_of (steps_of (rank_of u r)) = firstn (length (samples_of (steps_of (rank_of u r)))) (input r).
Proof.
  intros u r Ru H. destruct (a_run_with_losses_follows_a_run_without W cfg depth input ok u Ru) as [v [R F]].
  destruct (follows_frame W u v r F H) as [-> _]. rewrite <- (in_the_order_sampler_everything_stays_in_line v r R H).
  rewrite firstn_app, Nat.sub_diag, firstn_all, app_nil_r. reflexivity.
Qed.

(** ORDER, as the property is stated: no position is in a later step than a greater one. *)
Theorem in_the_order_sampler_no_position_is_in_a_later_step_than_a_greater_one : forall u r, lossy_reachable W cfg depth input u -> r < W ->
  StronglySorted (fun x y => forall a b, In a (s_group x) -> In b (s_group y) -> pos a < pos b) (steps_of (rank_of u r)).
Proof.
  intros u r Ru H. pose proof (in_the_order_sampler_the_steps_are_the_first_of_the_input u r Ru H) as E.
  assert (A : rising (samples_of (steps_of (rank_of u r)))) by (rewrite E; apply read_ascends, H). clear E. unfold samples_of in A.
  induction (steps_of (rank_of u r)) as [|x xs IH]; [constructor|]. simpl in A. apply sorted_app in A as [_ [A B]]. constructor; [apply IH, A|].
  apply Forall_forall. intros y Hy a b Ia Ib. apply B; [exact Ia|]. apply in_concat. exists (s_group y). split; [apply in_map, Hy|exact Ib].
Qed.

End Sampler.
