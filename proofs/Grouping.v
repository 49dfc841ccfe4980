(** The executable [compute_groups] of odb_ref/core/batching/grouping.py, with BUDGET and FEWEST for it. Spec: R2. *)
Require Import List Arith Lia Permutation Sorted.
From ODB Require Import Lists Types.
Import ListNotations.

(** ** The model *)

Definition shorter (x y : sample) : bool :=
  (len x <? len y) || ((len x =? len y) && (pos x <=? pos y)).

(** By length; ties by position. *)
Notation sort_length := (sort_by shorter).

(** [x], no shorter than any sample of [acc], would no longer fit. At most [most] tokens may be padding (R16.3). *)
Definition is_full (budget most : nat) (limits : list nat) (acc : group) (x : sample) : bool :=
  (budget <? S (length acc) * len x) || (most <? length acc * len x - total acc) || negb (is_within limits (x :: acc)).

(** The groups by rising length. A group is closed when the next sample would not fit. *)
Notation sweep budget most limits := (greedy (fun acc x => negb (is_full budget most limits acc x)) []).

(** Each group is reversed, so its longest sample comes first. *)
Definition compute_groups (budget most : nat) (limits : list nat) (window : list sample) : list group :=
  map (@rev sample) (sweep budget most limits (sort_length window)).

(** ** Sorting *)

Definition ascending : list sample -> Prop := StronglySorted (fun x y => len x <= len y).
Definition descending : list sample -> Prop := StronglySorted (fun x y => len y <= len x).

Lemma shorter_orders : orders shorter.
Proof. unfold shorter. orders_numbers. Qed.

Lemma sort_length_ascending : forall l, ascending (sort_length l).
Proof.
  intros l. eapply sorted_weaker; [|exact (sort_by_sorted _ _ l shorter_orders)]. intros x y. unfold shorter.
  rewrite Bool.orb_true_iff, Bool.andb_true_iff, Nat.ltb_lt, Nat.eqb_eq. lia.
Qed.

Lemma descending_head : forall x l, descending (x :: l) -> longest (x :: l) = len x.
Proof.
  intros x l H. inversion H as [|? ? H1 H2]; subst. simpl. rewrite Forall_forall in H2.
  assert (longest l <= len x) by (apply longest_bound; intros; apply H2; assumption). lia.
Qed.

(** ** Nothing is lost, nothing is empty *)

Lemma concat_reversed : forall gs : list group, Permutation (concat (map (@rev sample) gs)) (concat gs).
Proof. induction gs as [|g gs IH]; simpl; [constructor|]. rewrite IH, <- Permutation_rev. reflexivity. Qed.

Theorem groups_hold_exactly_the_window : forall b most limits w, Permutation (concat (compute_groups b most limits w)) w.
Proof. intros. unfold compute_groups. rewrite concat_reversed, greedy_concat. apply sort_by_perm. Qed.

Theorem no_group_is_empty : forall b most limits w, Forall (fun g => g <> []) (compute_groups b most limits w).
Proof.
  intros b most limits w. apply Forall_map. eapply Forall_impl; [|apply no_run_is_left_empty]. intros [|x g] Nh; [contradiction|].
  simpl. intros Z. apply app_eq_nil in Z as [_ Z]. discriminate.
Qed.

(** ** BUDGET *)

Lemma sweep_fits : forall b most limits l, ascending l -> Forall (fits b most limits) (sweep b most limits l).
Proof.
  intros b most limits l So. apply (greedy_keeps _ _ _ l) with (before := []); auto; [intros x _; left; simpl; lia|].
  intros before g x after -> _ J. apply Bool.negb_true_iff, Bool.orb_false_iff in J as [J Wa]. apply Bool.orb_false_iff in J as [J Pa].
  apply Nat.ltb_ge in J, Pa. apply Bool.negb_false_iff in Wa. apply (fits_perm _ _ _ (x :: g)); [apply Permutation_cons_append|].
  assert (L : longest (x :: g) = len x).
  { simpl. apply Nat.max_l, longest_bound. intros y Hy. apply sorted_app in So as [_ [So _]]. apply sorted_app in So as [_ [_ So]]. apply So; simpl; auto. }
  right. unfold padded. rewrite L. simpl in *. repeat split; [exact J|lia|exact Wa].
Qed.

Theorem every_group_fits_the_budget : forall b most limits w, Forall (fits b most limits) (compute_groups b most limits w).
Proof.
  intros. apply Forall_map. eapply Forall_impl; [|apply sweep_fits, sort_length_ascending]. intros g. apply fits_perm, Permutation_rev.
Qed.

(** The first sample of a group is its longest, so the Python's padded size is the true one. *)
Lemma first_of_a_part_is_the_longest : forall before g after, ascending (before ++ g ++ after) -> padded_first (rev g) = padded (rev g).
Proof.
  intros before g after So. apply sorted_app in So as [_ [So _]]. apply sorted_app in So as [So _]. apply sorted_rev in So.
  destruct (rev g) as [|x r]; [reflexivity|]. unfold padded_first, padded. rewrite (descending_head x r So). reflexivity.
Qed.

Theorem first_sample_of_a_group_is_the_longest : forall b most limits w, Forall (fun g => padded_first g = padded g) (compute_groups b most limits w).
Proof.
  intros b most limits w. apply Forall_map, Forall_forall. intros g I. apply in_split in I as [P1 [P2 E]].
  apply (first_of_a_part_is_the_longest (concat P1) g (concat P2)).
  pose proof (greedy_concat _ (fun acc x => negb (is_full b most limits acc x)) (sort_length w) []) as C. rewrite E, concat_app in C. cbn [concat app] in C.
  rewrite C. apply sort_length_ascending.
Qed.

(** ** FEWEST, part 1: runs of the sorted samples need no more groups than any partition that fits

    For tokens alone, without further limits. A counting argument: [count_ge t l] samples of [l] have at least [t] tokens. A group that
    holds a sample at least as long as the longest one left can be replaced by the same number of the longest samples left. *)

Notation count_ge t := (sum_over (fun x => if t <=? len x then 1 else 0)).

Lemma count_ge_pos : forall t l, 1 <= count_ge t l -> exists x, In x l /\ t <= len x.
Proof.
  induction l as [|x l IH]; simpl; intros H; [lia|]. destruct (t <=? len x) eqn:E.
  - apply Nat.leb_le in E. eauto.
  - destruct (IH H) as [y [? ?]]. eauto.
Qed.

Lemma count_ge_skipn : forall t l n, descending l -> count_ge t (skipn n l) <= count_ge t l - n.
Proof.
  induction l as [|x l IH]; intros n H.
  - rewrite skipn_nil. simpl. lia.
  - destruct n as [|n]; simpl skipn; [lia|]. inversion H as [|? ? H1 H2]; subst.
    specialize (IH n H1). simpl. destruct (t <=? len x) eqn:E; [lia|].
    enough (Z : count_ge t l <= sum_over (fun _ => 0) l) by (rewrite sum_over_const in Z; lia).
    apply sum_over_le. intros y Hy. rewrite Forall_forall in H2. specialize (H2 y Hy). apply Nat.leb_gt in E. destruct (Nat.leb_spec t (len y)); lia.
Qed.

Lemma partition_as_runs : forall b n P l, length P = n -> descending l -> Forall (fits b b []) P ->
  (forall t, count_ge t l <= count_ge t (concat P)) ->
  exists Q, concat Q = l /\ Forall (fits b b []) Q /\ length Q <= n.
Proof.
  induction n as [|n IH]; intros P l Na So F D.
  - destruct P; [|discriminate]. exists []. destruct l as [|x l]; [repeat split; auto|].
    specialize (D 0). simpl in D. lia.
  - destruct l as [|x l]; [exists []; repeat split; auto; simpl; lia|].
    assert (C : 1 <= count_ge (len x) (concat P)).
    { eapply Nat.le_trans; [|apply D]. simpl. rewrite Nat.leb_refl. lia. }
    destruct (count_ge_pos _ _ C) as [y [Hy Ly]].
    apply in_concat in Hy as [g [Hg Hy]]. destruct (in_split _ _ Hg) as [P1 [P2 ->]].
    assert (Lg : 1 <= length g) by (destruct g; [destruct Hy|simpl; lia]).
    destruct (IH (P1 ++ P2) (skipn (length g) (x :: l))) as [Q [Q1 [Q2 Q3]]].
    + rewrite app_length in *. simpl in Na. lia.
    + rewrite <- (firstn_skipn (length g)) in So. apply sorted_app in So. apply So.
    + rewrite Forall_app in *. destruct F as [F1 F2]. inversion F2; subst. split; assumption.
    + intros t. eapply Nat.le_trans; [apply count_ge_skipn, So|]. specialize (D t).
      rewrite concat_app in D. simpl in D. rewrite !sum_over_app in D. rewrite concat_app, sum_over_app.
      assert (Lc : count_ge t g <= sum_over (fun _ => 1) g) by (apply sum_over_le; intros z _; simpl; destruct (t <=? len z); lia). rewrite sum_over_const in Lc.
      change (count_ge t (x :: l)) with ((if t <=? len x then 1 else 0) + count_ge t l) in *. lia.
    + exists (firstn (length g) (x :: l) :: Q). simpl concat. rewrite Q1, firstn_skipn. split; [reflexivity|]. split; [|simpl; lia].
      constructor; [|assumption].
      assert (Fg : fits b b [] g) by (rewrite Forall_app in F; destruct F as [_ F2]; inversion F2; assumption).
      assert (Ln : length (firstn (length g) (x :: l)) <= length g) by apply firstn_le_length.
      destruct Fg as [Fg|[Fg _]]; [left; lia|]. right. enough (padded (firstn (length g) (x :: l)) <= b) by (repeat split; lia).
      unfold padded in *. eapply Nat.le_trans; [|exact Fg]. apply Nat.mul_le_mono; [exact Ln|].
      apply Nat.le_trans with (len x); [|apply Nat.le_trans with (len y); [exact Ly|apply longest_le, Hy]].
      rewrite <- (descending_head x l So). apply longest_incl. intros z Hz. rewrite <- (firstn_skipn (length g)). apply in_or_app. left. exact Hz.
Qed.

(** ** FEWEST, part 2: no cut of the sorted samples into runs has fewer than the sweep *)

Lemma runs_reversed : forall b (Q : list group), Forall (fits b b []) Q ->
  Forall (fits b b []) (rev (map (@rev sample) Q)) /\ concat (rev (map (@rev sample) Q)) = rev (concat Q) /\
  length (rev (map (@rev sample) Q)) = length Q.
Proof.
  intros b Q F. repeat split.
  - apply Forall_rev. apply Forall_map. eapply Forall_impl; [|exact F]. intros g Hg. eapply fits_perm; [apply Permutation_rev|exact Hg].
  - induction Q as [|q Q IH]; simpl; [reflexivity|]. inversion F; subst. rewrite concat_app, IH by assumption. simpl.
    rewrite app_nil_r, rev_app_distr. reflexivity.
  - rewrite rev_length, map_length. reflexivity.
Qed.

Theorem no_partition_under_the_budget_has_fewer_groups : forall b w P,
  Permutation (concat P) w -> Forall (fits b b []) P -> length (compute_groups b b [] w) <= length P.
Proof.
  intros b w P Pm F. unfold compute_groups. rewrite map_length. set (l := sort_length w).
  destruct (partition_as_runs b (length P) P (rev l)) as [Q [E [FQ LQ]]]; auto.
  - apply (sorted_rev _ _ l), sort_length_ascending.
  - intros t. apply Nat.eq_le_incl, sum_over_perm. rewrite <- Permutation_rev. rewrite Pm. apply sort_by_perm.
  - destruct (runs_reversed b Q FQ) as [FR [ER LR]]. rewrite E, rev_involutive in ER. rewrite <- LR in LQ. eapply Nat.le_trans; [|exact LQ].
    apply (no_good_runs_are_fewer _ _ (fits b b [])); [| |exact FR|exact ER].
    + intros g h k. apply (fits_part b b [] h (g ++ k)). rewrite !app_assoc. apply Permutation_app_tail, Permutation_app_comm.
    + intros g x Nh [Fx|[Fx _]]; [rewrite app_length in Fx; destruct g; [contradiction|simpl in Fx; lia]|].
      unfold padded in Fx. rewrite app_length, longest_app in Fx. simpl in Fx. assert (S (length g) * len x <= b) by (eapply Nat.le_trans; [|exact Fx]; apply Nat.mul_le_mono; lia).
      apply Bool.negb_true_iff, Bool.orb_false_iff. split; [apply Bool.orb_false_iff; split; apply Nat.ltb_ge; simpl in *; lia|reflexivity].
Qed.

(** With a further limit this fails: amounts 2, 3, 2 and 1, by rising length, fit two groups under a limit of 4, but the sweep makes
    three. *)
Theorem with_limits_the_sweep_may_use_more_groups_than_needed : exists b limits w P,
  Permutation (concat P) w /\ Forall (fits b b limits) P /\ length P < length (compute_groups b b limits w).
Proof.
  set (x n c := mkSample n n 1 0 [c]).
  exists 4, [4], [x 0 2; x 1 3; x 2 2; x 3 1], [[x 0 2; x 2 2]; [x 1 3; x 3 1]]. split; [|split].
  - simpl. apply perm_skip, perm_swap.
  - repeat constructor; right; split; simpl; auto.
  - simpl. lia.
Qed.
