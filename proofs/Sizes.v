(** Friendly numbers of samples: the executable [Sizes] of odb_ref/core/batching/sizes.py, [compute_sized_groups] of grouping.py, and
    SIZES for groups as formed, as aligned, and in every step of the system. Spec: R2.8, R4.2. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Grouping Alignment Order Layouts Runs Machine Local Rules System Facts Budgets Instance Loss Updates Joined.
Import ListNotations.

(** ** Which numbers are friendly *)

(** What [s], which tells whether a number is friendly, has to meet: 1 is friendly, and every larger friendly number is the sum of two
    friendly numbers, the first at least half. *)
Record sizes_ok (s : nat -> bool) : Prop := {
  one_is_friendly : s 1 = true;
  friendly_splits : forall n, 2 <= n -> s n = true -> exists m, Nat.div2 (S n) <= m < n /\ s m = true /\ s (n - m) = true }.

Inductive sizes := Any | Even | Threes | Powers.

Definition is_power (n : nat) : bool := n =? 2 ^ Nat.log2 n.

Definition friendly_in (k : sizes) (n : nat) : bool :=
  match k with
  | Any => true
  | Even => (n =? 1) || Nat.even n
  | Threes => is_power n || (n =? 3 * 2 ^ Nat.log2 (Nat.div n 3))
  | Powers => is_power n
  end.

Lemma is_power_true : forall n, is_power n = true <-> exists k, n = 2 ^ k.
Proof.
  intros n. unfold is_power. rewrite Nat.eqb_eq. split; [eauto|]. intros [k ->]. rewrite Nat.log2_pow2 by lia. reflexivity.
Qed.

Lemma is_threes_true : forall n, friendly_in Threes n = true <-> exists k, n = 2 ^ k \/ n = 3 * 2 ^ k.
Proof.
  intros n. unfold friendly_in. rewrite orb_true_iff, is_power_true, Nat.eqb_eq. split.
  - intros [[k E]|E]; eauto.
  - intros [k [E|E]]; [eauto|]. right. replace (Nat.div n 3) with (2 ^ k) by (rewrite E, Nat.mul_comm, Nat.div_mul by lia; reflexivity).
    rewrite Nat.log2_pow2 by lia. exact E.
Qed.

(** The friendly numbers are those that R2.8 lists. *)
Theorem the_shipped_sizes_are_as_listed : forall n,
  friendly_in Any n = true /\
  (friendly_in Even n = true <-> n = 1 \/ exists k, n = 2 * k) /\
  (friendly_in Threes n = true <-> exists k, n = 2 ^ k \/ n = 3 * 2 ^ k) /\
  (friendly_in Powers n = true <-> exists k, n = 2 ^ k).
Proof.
  intros n. split; [reflexivity|]. split; [|split; [apply is_threes_true|apply is_power_true]].
  unfold friendly_in. rewrite orb_true_iff, Nat.eqb_eq, Nat.even_spec. reflexivity.
Qed.

Lemma twice_splits : forall (s : nat -> bool) m, 1 <= m -> s m = true ->
  exists h, Nat.div2 (S (2 * m)) <= h < 2 * m /\ s h = true /\ s (2 * m - h) = true.
Proof. intros s m L E. exists m. rewrite Nat.div2_succ_double. replace (2 * m - m) with m by lia. repeat split; auto; lia. Qed.

Lemma power_positive : forall k, 1 <= 2 ^ k.
Proof. intros k. pose proof (Nat.pow_nonzero 2 k). lia. Qed.

Theorem the_shipped_sizes_meet_every_assumption : forall k, sizes_ok (friendly_in k).
Proof.
  intros k. constructor; [destruct k; reflexivity|]. intros n L E. destruct k.
  - exists (Nat.div2 (S n)). pose proof (Nat.div2_odd (S n)) as O. destruct (Nat.odd (S n)); simpl Nat.b2n in O; repeat split; lia.
  - apply (the_shipped_sizes_are_as_listed n) in E. destruct E as [E|[m ->]]; [lia|].
    destruct (Nat.even m) eqn:P; [apply twice_splits; [lia|]; simpl; rewrite P; apply orb_true_r|].
    destruct (Nat.eq_dec m 1) as [->|NE]; [exists 1; repeat split; auto|].
    assert (O : Nat.odd m = true) by (rewrite <- Nat.negb_even, P; reflexivity). apply Nat.odd_spec in O as [j ->].
    exists (2 * S j). rewrite Nat.div2_succ_double. unfold friendly_in. split; [lia|].
    split; apply orb_true_iff; right; apply Nat.even_spec; [exists (S j)|exists j]; lia.
  - apply is_threes_true in E as [[|j] [-> | ->]]; [simpl in L; lia|exists 2; repeat split; auto| |].
    + rewrite Nat.pow_succ_r'. apply twice_splits; [apply power_positive|]. apply is_threes_true. eauto.
    + replace (3 * 2 ^ S j) with (2 * (3 * 2 ^ j)) by (rewrite Nat.pow_succ_r'; lia). pose proof (power_positive j).
      apply twice_splits; [lia|]. apply is_threes_true. eauto.
  - apply is_power_true in E as [[|j] ->]; [simpl in L; lia|]. rewrite Nat.pow_succ_r'. apply twice_splits; [apply power_positive|].
    apply is_power_true. eauto.
Qed.

(** ** The model *)

Section Sized.
Variable s : nat -> bool.
Hypothesis ok : sizes_ok s.

(** The largest friendly number that is at most [n], or 0. *)
Fixpoint round_down (n : nat) : nat := match n with 0 => 0 | S m => if s n then n else round_down m end.

(** Takes the first group that R2.1 makes of the samples [l], which are sorted by length, cuts it to a friendly number of its shortest
    samples, and continues with the samples left. *)
Fixpoint cut (fuel budget most : nat) (limits : list nat) (l : list sample) : list group :=
  match fuel with
  | 0 => []
  | S f =>
      match sweep budget most limits l with
      | [] => []
      | g :: _ => let n := round_down (length g) in rev (firstn n l) :: cut f budget most limits (skipn n l)
      end
  end.

Definition compute_sized_groups (budget most : nat) (limits : list nat) (window : list sample) : list group :=
  cut (length window) budget most limits (sort_length window).

(** The smallest first half such that both parts are friendly. *)
Definition sized_middle (n : nat) : nat :=
  let half := Nat.div2 (S n) in
  match find (fun m => s m && s (n - m)) (seq half (n - half)) with Some m => m | None => half end.

Definition sized_gauge (C : nat -> nat) : gauge :=
  mkGauge (tokens_of (gauge_of Padded C)) (cost_of (gauge_of Padded C)) (fun g => sized_middle (length g)).

(** SIZES: a step has a friendly number of samples, or none if it is idle. *)
Definition is_friendly (g : group) : Prop := g = [] \/ s (length g) = true.

(** ** Rounding down *)

Theorem rounding_down_gives_the_largest_friendly_number : forall n, 1 <= n ->
  s (round_down n) = true /\ 1 <= round_down n <= n /\ forall m, round_down n < m <= n -> s m = false.
Proof.
  induction n as [|n IH]; intros L; [lia|]. cbn [round_down]. destruct (s (S n)) eqn:E; [split; [exact E|]; split; [lia|intros; lia]|].
  destruct n as [|n]; [rewrite (one_is_friendly s ok) in E; discriminate|]. destruct IH as [I1 [I2 I3]]; [lia|].
  split; [exact I1|]. split; [lia|]. intros m Lm. destruct (Nat.eq_dec m (S (S n))) as [->|NE]; [exact E|apply I3; lia].
Qed.

(** ** Grouping *)

(** A cut takes some of the shortest samples, at least one, and only samples of one group of R2.1. *)
Lemma cut_step : forall f b most limits x l, exists n g gs, cut (S f) b most limits (x :: l) = rev (firstn n (x :: l)) :: cut f b most limits (skipn n (x :: l)) /\
  1 <= n <= length (x :: l) /\ s n = true /\ sweep b most limits (x :: l) = g :: gs /\ Permutation (rev (firstn n (x :: l)) ++ skipn n g) g.
Proof.
  intros f b most limits x l. pose proof (greedy_concat _ (fun acc y => negb (is_full b most limits acc y)) (x :: l) []) as C.
  pose proof (no_run_is_left_empty _ (fun acc y => negb (is_full b most limits acc y)) (x :: l)) as F. cbn [cut].
  destruct (sweep b most limits (x :: l)) as [|g gs]; [discriminate|]. inversion F as [|? ? Nh _]; subst.
  destruct (rounding_down_gives_the_largest_friendly_number (length g)) as [R1 [R2 _]]; [destruct g; [contradiction|simpl; lia]|].
  exists (round_down (length g)), g, gs. set (n := round_down (length g)) in *. pose proof (f_equal (@length sample) C) as L. cbn [concat app] in C, L. rewrite app_length in L.
  split; [reflexivity|]. split; [lia|]. split; [exact R1|]. split; [reflexivity|].
  rewrite <- C, firstn_app. replace (n - length g) with 0 by lia. simpl. rewrite app_nil_r, <- Permutation_rev, firstn_skipn. reflexivity.
Qed.

Lemma cut_perm : forall f b most limits l, length l <= f -> Permutation (concat (cut f b most limits l)) l.
Proof.
  induction f as [|f IH]; intros b most limits [|x l] L; try (simpl in L; lia); try reflexivity.
  destruct (cut_step f b most limits x l) as [n [g [gs [-> [Ln _]]]]]. cbn [concat]. rewrite IH by (rewrite skipn_length; simpl length in *; lia).
  rewrite <- Permutation_rev, firstn_skipn. reflexivity.
Qed.

Theorem sized_groups_hold_exactly_the_window : forall b most limits w, Permutation (concat (compute_sized_groups b most limits w)) w.
Proof.
  intros. unfold compute_sized_groups. rewrite cut_perm; [apply sort_by_perm|].
  rewrite (Permutation_length (sort_by_perm _ shorter w)). reflexivity.
Qed.

(** A property of every group that is cut from sorted samples holds of all groups. *)
Lemma cut_keeps : forall (P : group -> Prop) b most limits,
  (forall l n g gs, ascending l -> 1 <= n <= length l -> s n = true -> sweep b most limits l = g :: gs ->
    Permutation (rev (firstn n l) ++ skipn n g) g -> P (rev (firstn n l))) ->
  forall f l, ascending l -> Forall P (cut f b most limits l).
Proof.
  intros P b most limits H. induction f as [|f IH]; intros [|x l] A; try constructor.
  destruct (cut_step f b most limits x l) as [n [g [gs [-> [Ln [Sn [Sw Pm]]]]]]]. constructor; [exact (H _ _ _ _ A Ln Sn Sw Pm)|]. apply IH.
  rewrite <- (firstn_skipn n) in A. apply sorted_app in A. apply A.
Qed.

Theorem every_sized_group_is_friendly : forall b most limits w, Forall (fun g => g <> [] /\ s (length g) = true) (compute_sized_groups b most limits w).
Proof.
  intros. apply cut_keeps; [|apply sort_length_ascending]. intros l n g gs _ Ln Sn _ _.
  assert (E : length (rev (firstn n l)) = n) by (rewrite rev_length, firstn_length; lia). rewrite E. split; [|exact Sn].
  intros Z. rewrite Z in E. simpl in E. lia.
Qed.

Theorem every_sized_group_fits_the_budget : forall b most limits w, Forall (fits b most limits) (compute_sized_groups b most limits w).
Proof.
  intros. apply cut_keeps; [|apply sort_length_ascending]. intros l n g gs A _ _ Sw Pm. eapply fits_part; [exact Pm|].
  pose proof (sweep_fits b most limits l A) as F. rewrite Sw in F. inversion F. assumption.
Qed.

Theorem first_sample_of_a_sized_group_is_the_longest : forall b most limits w,
  Forall (fun g => padded_first g = padded g) (compute_sized_groups b most limits w).
Proof.
  intros. apply cut_keeps; [|apply sort_length_ascending]. intros l n g gs A _ _ _ _.
  apply (first_of_a_part_is_the_longest [] (firstn n l) (skipn n l)). simpl. rewrite firstn_skipn. exact A.
Qed.

(** ** Splitting *)

Lemma sized_middle_bounds : forall n, 2 <= n -> 1 <= sized_middle n < n.
Proof.
  intros n L. unfold sized_middle. pose proof (Nat.div2_odd (S n)) as O. set (half := Nat.div2 (S n)) in *.
  destruct (find _ _) as [m|] eqn:E; [|destruct (Nat.odd (S n)); simpl Nat.b2n in O; lia].
  apply find_some in E as [E _]. apply in_seq in E. destruct (Nat.odd (S n)); simpl Nat.b2n in O; lia.
Qed.

Lemma first_found : forall (p : nat -> bool) k a m, find p (seq a k) = Some m -> forall i, a <= i < m -> p i = false.
Proof.
  induction k as [|k IH]; simpl; intros a m E i L; [discriminate|]. destruct (p a) eqn:P; [injection E as <-; lia|].
  destruct (Nat.eq_dec i a) as [->|NE]; [exact P|]. apply (IH (S a) m E). lia.
Qed.

Theorem halves_of_a_friendly_group_are_friendly : forall n, 2 <= n -> s n = true ->
  let m := sized_middle n in s m = true /\ s (n - m) = true /\ Nat.div2 (S n) <= m < n /\
  forall fewer, Nat.div2 (S n) <= fewer < m -> s fewer = false \/ s (n - fewer) = false.
Proof.
  intros n L E. cbv zeta. destruct (friendly_splits s ok n L E) as [m [Lm [S1 S2]]]. unfold sized_middle. set (half := Nat.div2 (S n)) in *.
  destruct (find _ _) as [k|] eqn:F.
  - pose proof (first_found _ _ _ _ F) as Fi. apply find_some in F as [I B]. apply in_seq in I. apply andb_true_iff in B as [B1 B2].
    repeat split; try assumption; try lia. intros fewer Lf. apply andb_false_iff, (Fi fewer Lf).
  - exfalso. assert (I : In m (seq half (n - half))) by (apply in_seq; lia). pose proof (find_none _ _ F m I) as Z. cbv beta in Z.
    rewrite S1, S2 in Z. discriminate.
Qed.

Theorem with_sizes_groups_are_measured_as_is_asked : forall C, cost_ok C -> gauge_ok (sized_gauge C).
Proof.
  intros C Co. destruct (every_layout_and_cost_measures_groups_as_is_asked Padded C Co) as [_ Id Pa]. constructor; [|exact Id|exact Pa].
  intros g L. apply sized_middle_bounds, L.
Qed.

(** ** Alignment *)

Lemma halves_friendly : forall C g, 2 <= length g -> is_friendly g ->
  is_friendly (firstn (middle_of (sized_gauge C) g) g) /\ is_friendly (skipn (middle_of (sized_gauge C) g) g).
Proof.
  intros C g L [->|E]; [simpl in L; lia|]. cbn [middle_of sized_gauge].
  destruct (halves_of_a_friendly_group_are_friendly (length g) L E) as [S1 [S2 [Lm _]]].
  split; right; [rewrite firstn_length, Nat.min_l by lia; exact S1|rewrite skipn_length; exact S2].
Qed.

Theorem an_alignment_of_friendly_groups_is_friendly : forall C way gs target due, Forall is_friendly gs ->
  Forall is_friendly (fst (align (sized_gauge C) way gs target due)).
Proof.
  intros C way gs target due F. unfold align. destruct (target <? length gs); simpl.
  - apply sort_by_forall, Forall_firstn, sort_by_forall, F.
  - apply Forall_app. split; [apply sort_by_forall, split_keeps; [apply halves_friendly|exact F]|].
    apply Forall_repeat. left. reflexivity.
Qed.

Theorem shuffled_friendly_groups_are_friendly : forall C way before k gs t d, Forall is_friendly gs ->
  Forall is_friendly (fst (shuffle (sized_gauge C) way before k gs t d)).
Proof.
  intros C way before k gs t d F. rewrite shuffle_fst. apply arrange_keeps; [apply permutation_fits|left; reflexivity|].
  apply an_alignment_of_friendly_groups_is_friendly, F.
Qed.

End Sized.

(** ** The configuration with sizes

    Friendly sizes go with padded groups only, and not with the sampler's order. Otherwise the configuration is that of Instance.v. *)

Definition sized (s : nat -> bool) (C : nat -> nat) (whole padding_share : nat) (limits : list nat) (first : nat -> nat) (accepts : nat -> nat -> nat)
  (size ramp max_age : nat) (is_quota : bool) (quota : option nat) (rule : offer -> nat) (print : nat)
  (before : nat -> nat -> nat -> bool) (bounded : nat -> bool) : config :=
  mkConfig (fun b => compute_sized_groups s (budget_of whole b) (Nat.div (budget_of whole b) padding_share) (limits_of whole limits b)) (align_in (ByPlaces before) (sized_gauge s C))
    (fun _ => window_samples size ramp) is_quota quota max_age rule print (fun r => offered whole (first r)) (fun r k => offered whole (accepts r k)) bounded false (keeps_one Padded whole) None.

Section System.
Variables (s : nat -> bool) (C : nat -> nat) (W size ramp max_age print whole padding_share : nat).
Variables (limits : list nat) (first : nat -> nat) (accepts : nat -> nat -> nat) (is_quota : bool).
Variables (quota : option nat) (rule : offer -> nat) (before : nat -> nat -> nat -> bool).
Variables (windowed : nat -> bool) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis some : 1 <= W.
Hypothesis friendly : sizes_ok s.
Hypothesis costs_grow : cost_ok C.
Hypothesis old : 1 <= max_age.
Hypothesis bounded : within_bounds rule.

Notation one := (sized s C whole padding_share limits first accepts size ramp max_age is_quota quota rule print before windowed).
Notation all := (fun _ : nat => one).

(** So everything proved of such ranks holds with sizes. *)
Theorem ranks_with_sizes_meet_every_assumption : setting_ok W all.
Proof.
  constructor; auto. intros _ _. pose proof (with_sizes_groups_are_measured_as_is_asked s C costs_grow) as M.
  constructor; cbn [c_group c_align c_window c_max_age c_rule sized]; auto using sized_groups_hold_exactly_the_window,
    in_every_order_an_alignment_has_the_target_number_of_steps, in_every_order_an_alignment_keeps_exactly_the_groups, in_every_order_no_step_is_left_idle.
  - intros b w. eapply Forall_impl; [|apply every_sized_group_is_friendly, friendly]. intros g [NE _]. exact NE.
  - intros k gs t d D. destruct (carried_in (ByPlaces before) (sized_gauge s C) k gs t d) as [way ->].
    apply nothing_due_is_carried_when_the_target_covers_the_due_groups, D.
  - intros _ k. unfold window_samples. lia.
Qed.

(** And everything proved of updates. *)
Theorem ranks_with_sizes_are_of_updates : forall shares windows p,
  ships_updates (with_reading shares windows p) (fun _ => with_reading shares windows p (sized s C whole padding_share limits first accepts size ramp max_age false None rule print before (fun _ => false))).
Proof.
  intros shares windows p. do 9 eexists. split; [|split; [exact (with_sizes_groups_are_measured_as_is_asked s C costs_grow)|split; [exact old|split; [exact bounded|reflexivity]]]].
  intros b w. split; [apply sized_groups_hold_exactly_the_window, friendly|]. eapply Forall_impl; [|apply every_sized_group_is_friendly, friendly]. intros g [NE _]. exact NE.
Qed.

(** SIZES and BUDGET in every step of every rank, with losses or without, with any windows, and with a shared order or without. The
    budget is the one in force in the step's round. *)
Theorem every_batch_of_ranks_with_sizes_is_friendly_and_keeps_the_budget : forall shares windows updates, let cfg := fun _ : nat => with_reading shares windows updates one in
  setting_ok W cfg -> forall u r, lossy_reachable W cfg depth input u -> r < W ->
  Forall (fun x => let b := budget_in_force W whole first accepts r (s_round x) in is_friendly s (s_group x) /\
    fits b (Nat.div b padding_share) (limits_in_force W whole limits first accepts r (s_round x)) (s_group x))
    (steps_of (rank_of u r)).
Proof.
  intros shares windows updates cfg ok u r Ru H.
  destruct (a_run_with_losses_follows_a_run_without W cfg depth input ok u Ru) as [v [R F]]. destruct (follows_frame W u v r F H) as [-> _].
  set (keeps := fun b g => is_friendly s g /\ fits (budget_of whole b) (Nat.div (budget_of whole b) padding_share) (limits_of whole limits b) g).
  assert (Formed : forall q b w, q < W -> Forall (keeps b) (c_group one b w)).
  { intros q b w _. apply Forall_and; [|apply every_sized_group_fits_the_budget, friendly].
    eapply Forall_impl; [|apply every_sized_group_is_friendly, friendly]. intros g [_ E]. right. exact E. }
  assert (Aligned : forall q b k gs t d, q < W -> Forall (keeps b) gs -> Forall (keeps b) (fst (c_align one k gs t d))).
  { intros q b k gs t d _ G. apply Forall_and_inv in G as [G1 G2]. apply Forall_and.
    - apply shuffled_friendly_groups_are_friendly; assumption.
    - apply shuffling_keeps_what_passes_to_parts; [left; simpl; lia|apply (fits_in_passes_on Padded)|exact G2]. }
  pose proof (every_batch_keeps_what_grouping_gives_under_the_budget_in_force W cfg depth input ok keeps Formed Aligned v r R H) as Z.
  rewrite Forall_forall in *. intros x Ix. specialize (Z x Ix). destruct Z as [Z1 Z2]. split; [exact Z1|]. rewrite (limits_by_budget W max_age whole limits some old) in Z2.
  unfold limits_in_force.
  rewrite <- (the_budget_in_force_by_round W max_age whole first accepts depth input some old (with_reading shares windows updates one) eq_refl eq_refl ok v r x R H Ix). exact Z2.
Qed.

End System.
