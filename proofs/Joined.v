(** What is proved of grouping, of alignment and of losses, joined to the steps that the system makes with the shipped configuration. *)
Require Import List Arith Lia Bool Permutation QArith.
From ODB Require Import Types Grouping Alignment Order Layouts Machine Local Rules System Facts Protocol Rounds Instance Loss Weight.
Import ListNotations.
Open Scope nat_scope.

(** ** Losses *)

(** The losses of a sample's supervised tokens; any. *)
Definition losses_of (loss : sample -> list Q) (g : group) : micro :=
  match g with [] => Idle 0%Q | _ => Batch (flat_map loss g) end.

(** What the ranks train on in [m] steps from step [j]. *)
Definition window_of (W : nat) (loss : sample -> list Q) (s : sys) (j m : nat) : list (list micro) :=
  map (fun r => map (fun i => losses_of loss (nth i (groups_of (rank_of s r)) [])) (seq j m)) (seq 0 W).

(** The supervised tokens of all ranks in these steps, as the steps of one rank say. *)
Definition counted (u : state) (j m : nat) : nat := sum_nat (map (fun x => n_supervised (s_counts x)) (firstn m (skipn j (steps_of u)))).

(** The scale of a rank's loss, of which it knows its own batch, [W], and the counts of its steps. *)
Definition scale_of_mean (W total : nat) (m : micro) : Q :=
  match m with Batch ts => (q_of (length ts) * q_of W / q_of total)%Q | Idle _ => 0%Q end.
Definition scale_of_sum (W total : nat) (m : micro) : Q :=
  match m with Batch _ => (q_of W / q_of total)%Q | Idle _ => 0%Q end.

Lemma sum_supervised : forall l a, n_supervised (fold_left add_counts l a) = n_supervised a + sum_nat (map n_supervised l).
Proof. induction l as [|x l IH]; simpl; intros a; [lia|]. rewrite IH. simpl. lia. Qed.

Lemma losses_supervised : forall loss g, (forall x, length (loss x) = sup x) -> supervised (losses_of loss g) = n_supervised (count_group g).
Proof.
  intros loss g L. assert (F : length (flat_map loss g) = sum_nat (map sup g)).
  { induction g as [|x g IH]; simpl; [reflexivity|]. rewrite app_length, L, IH. reflexivity. }
  unfold losses_of, supervised, count_group. simpl. destruct g; [reflexivity|exact F].
Qed.

Lemma sum_nat_swap : forall (f : nat -> nat -> nat) rs js,
  sum_nat (map (fun r => sum_nat (map (fun j => f r j) js)) rs) = sum_nat (map (fun j => sum_nat (map (fun r => f r j) rs)) js).
Proof.
  intros f rs. induction js as [|j js IH]; simpl.
  - induction rs; simpl; auto.
  - rewrite <- IH. clear IH. induction rs as [|r rs IH]; simpl; [reflexivity|]. rewrite IH. lia.
Qed.

Lemma nth_steps : forall u j x, nth_error (steps_of u) j = Some x -> nth j (groups_of u) [] = s_group x.
Proof.
  intros u j x E. unfold groups_of. assert (L : j < length (steps_of u)) by (apply nth_error_Some; congruence).
  rewrite app_nth1 by (rewrite map_length; exact L). apply nth_error_nth. apply map_nth_error, E.
Qed.

Lemma firstn_skipn_map : forall (A B : Type) (f : A -> B) (g : nat -> B) l m j, j + m <= length l -> (forall i x, nth_error l i = Some x -> f x = g i) ->
  map f (firstn m (skipn j l)) = map g (seq j m).
Proof.
  intros A B f g l m. induction m as [|m IH]; intros j L H; [reflexivity|]. simpl seq. simpl map.
  destruct (nth_error l j) as [x|] eqn:E; [|apply nth_error_None in E; lia].
  assert (Sk : skipn j l = x :: skipn (S j) l).
  { clear - E. revert j E. induction l as [|y l IH]; intros j E; [destruct j; discriminate|]. destruct j; [injection E as ->; reflexivity|]. simpl in *. rewrite (IH j E). reflexivity. }
  rewrite Sk. change (f x :: map f (firstn m (skipn (S j) l)) = g j :: map g (seq (S j) m)). rewrite (H j x E). f_equal. apply IH; [lia|exact H].
Qed.

Section Joined.
Variable W : nat.
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).

Lemma counted_is_all_supervised : forall loss s r j m, (forall x, length (loss x) = sup x) -> reachable s -> r < W ->
  j + m <= length (steps_of (rank_of s r)) -> all_supervised (window_of W loss s j m) = counted (rank_of s r) j m.
Proof.
  intros loss s r j m L R H Lj. unfold counted.
  set (own := fun i => sum_nat (map (fun q => n_supervised (count_group (nth i (groups_of (rank_of s q)) []))) (seq 0 W))).
  rewrite (firstn_skipn_map _ _ (fun x => n_supervised (s_counts x)) own (steps_of (rank_of s r)) m j Lj).
  2:{ intros i x E. unfold own. rewrite (global_counts_are_the_sums_over_all_ranks W cfg depth input ok s r i x R H E).
      unfold sum_counts. rewrite sum_supervised. simpl. rewrite map_map. reflexivity. }
  unfold own. rewrite <- sum_nat_swap. unfold all_supervised, window_of, sum_nat. f_equal. rewrite map_map. apply map_ext. intros q. f_equal. rewrite map_map. apply map_ext. intros i.
  apply losses_supervised, L.
Qed.

(** WEIGHT, for the steps that the system makes: whatever the losses of the samples' supervised tokens are, over any [m] steps from
    step [j] on, with the counts that the steps of any one rank say. *)
Theorem the_steps_of_the_system_train_on_the_global_mean : forall loss s r j m, (forall x, length (loss x) = sup x) -> reachable s -> r < W ->
  j + m <= length (steps_of (rank_of s r)) -> 0 < counted (rank_of s r) j m ->
  let world := window_of W loss s j m in
  let total := counted (rank_of s r) j m in
  Qeq (averaged world (fun b => scale_of_mean W total b * mean_loss b)%Q) (global_mean world) /\
  Qeq (averaged world (fun b => scale_of_sum W total b * sum_loss b)%Q) (global_mean world).
Proof.
  intros loss s r j m L R H Lj T world total. pose proof (counted_is_all_supervised loss s r j m L R H Lj) as A. fold world in A. fold total in A, T.
  assert (Wa : length world = W) by (unfold world, window_of; rewrite map_length, seq_length; reflexivity).
  assert (P1 : (0 < length world)%nat) by lia. assert (P2 : (0 < all_supervised world)%nat) by lia.
  pose proof (the_average_of_the_scaled_losses_is_the_global_mean world P1 P2) as X1. pose proof (the_average_of_the_scaled_sums_is_the_global_mean world P1 P2) as X2.
  unfold mean_scale in X1. unfold sum_scale in X2. rewrite A, Wa in X1, X2. split; [exact X1|exact X2].
Qed.

End Joined.

(** ** The shipped configuration *)

Section Shipped.
Variable shape : layout.
Variable C : nat -> nat.
Variables W size ramp max_age print : nat.
(** What each rank accepts in each round; the largest budget there is, and what of the limits goes with a budget. *)
Variable whole first : nat.
Variable accepts : nat -> nat -> nat.
Variable limits_of : nat -> list nat.
Variable is_quota : bool.
Variable quota : option nat.
Variable rule : offer -> nat.
Variable before : nat -> nat -> nat -> bool.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis some : 1 <= W.
Hypothesis costs_grow : cost_ok C.
Hypothesis old : 1 <= max_age.
Hypothesis bounded : within_bounds rule.

(** The least that the ranks have offered in a round. *)
Definition agreed_budget (k : nat) : nat := fold_right Nat.min whole (map (fun q => accepts q k) (seq 0 W)).

(** The budget in force (R15.1): in the first round one with which all ranks begin, then what was agreed on in the round before.
    That ranks may begin with different ones is not covered: configurations of equal fingerprint are equal here. *)
Definition in_force (k : nat) : nat := match k with 0 => Nat.min whole first | S j => agreed_budget j end.

Notation all := (fun _ : nat => shipped shape C in_force (fun k => limits_of (in_force k)) size ramp max_age is_quota quota rule print before).

(** Every assumption about the ranks holds. *)
Theorem ranks_with_the_shipped_configuration_meet_every_assumption : setting_ok W all.
Proof. constructor; auto. intros r _. apply the_shipped_configuration_meets_every_assumption; assumption. Qed.

(** BUDGET, in every step of every rank, with losses and without: of the budget in force in the step's round. *)
Theorem every_batch_of_the_shipped_configuration_keeps_the_budget : forall u r, lossy_reachable W all depth input u -> r < W ->
  Forall (fun x => fits_in shape (in_force (s_round x)) (limits_of (in_force (s_round x))) (s_group x)) (steps_of (rank_of u r)).
Proof.
  intros u r Ru H. pose proof ranks_with_the_shipped_configuration_meet_every_assumption as ok.
  destruct (a_run_with_losses_follows_a_run_without W all depth input ok u Ru) as [v [R F]]. destruct (follows_frame W u v r F H) as [-> _].
  apply (every_batch_keeps_what_grouping_gives_its_round W all depth input ok (fun _ k => fits_in shape (in_force k) (limits_of (in_force k)))); [| |exact R|exact H].
  - intros q k w _. simpl. apply in_either_layout_every_group_fits_the_budget.
  - intros q k gs t d _ G. simpl. apply shuffling_keeps_the_budget; assumption.
Qed.

Lemma least_is_least : forall l x, In x l -> fold_right Nat.min whole l <= x.
Proof. induction l as [|y l IH]; simpl; intros x []; subst; [lia|]. specialize (IH x H). lia. Qed.

Lemma least_is_one : forall l, fold_right Nat.min whole l = whole \/ In (fold_right Nat.min whole l) l.
Proof.
  induction l as [|y l IH]; simpl; [left; reflexivity|]. destruct (Nat.min_dec y (fold_right Nat.min whole l)) as [-> | ->]; [right; left; reflexivity|].
  destruct IH as [E|I]; [left; exact E|right; right; exact I].
Qed.

Lemma least_is_bounded : forall l, fold_right Nat.min whole l <= whole.
Proof. induction l; simpl; lia. Qed.

(** The budget of every round but the first is the same on all ranks, and none of them has offered less in the round before. *)
Theorem the_budget_in_force_is_the_least_that_a_rank_has_offered_the_round_before : forall k,
  (forall q, q < W -> in_force (S k) <= accepts q k) /\ in_force (S k) <= whole /\
  (in_force (S k) = whole \/ exists q, q < W /\ in_force (S k) = accepts q k).
Proof.
  intros k. simpl. split; [|split; [apply least_is_bounded|]].
  - intros q Hq. apply least_is_least. change (accepts q k) with ((fun q => accepts q k) q). apply in_map, in_seq. lia.
  - destruct (least_is_one (map (fun q => accepts q k) (seq 0 W))) as [E|I]; [left; exact E|right].
    apply in_map_iff in I as [q [E I]]. apply in_seq in I. exists q. split; [lia|symmetry; exact E].
Qed.

(** TERM, in join mode: rounds and exchanges by the largest shard. *)
Theorem the_shipped_configuration_makes_no_more_rounds_than_the_largest_shard_has_samples : forall largest, is_quota = false -> quota = None ->
  (forall r, r < W -> length (input r) <= largest) -> forall s r, System.reachable W all depth input s -> r < W ->
  round (rank_of s r) <= largest /\ length (log s) <= 2 * largest + 2.
Proof.
  intros largest Q1 Q2 L s r R H. apply (join_mode_has_no_more_rounds_than_the_largest_shard_has_samples W all depth input ranks_with_the_shipped_configuration_meet_every_assumption); auto.
  intros _ k gs t d _ L'. simpl. rewrite shuffle_snd. apply an_alignment_carries_only_surplus_groups, L'.
Qed.

End Shipped.
