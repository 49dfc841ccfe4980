(** The theorems about grouping, alignment and losses, applied to the steps that the system makes with the shipped configuration. *)
Require Import List Arith Lia Bool Permutation Sorted QArith.
From ODB Require Import Lists Types Grouping Alignment Order Layouts Runs Machine Local Rules System Facts Keeps Protocol Budgets Termination Rounds Instance Loss Sampler Weight.
Import ListNotations.
Open Scope nat_scope.

(** ** Losses *)

(** The losses of a sample's supervised tokens, which are arbitrary. *)
Definition losses_of (loss : sample -> list Q) (g : group) : micro :=
  match g with [] => Idle 0%Q | _ => Batch (flat_map loss g) end.

(** What the ranks train on in [m] steps from step [j] on. *)
Definition window_of (W : nat) (loss : sample -> list Q) (s : sys) (j m : nat) : list (list micro) :=
  map (fun r => map (fun i => losses_of loss (nth i (groups_of (rank_of s r)) [])) (seq j m)) (seq 0 W).

(** The number of supervised tokens of all ranks in these steps, according to the steps of one rank. *)
Definition counted (u : state) (j m : nat) : nat := sum_over (fun x => n_supervised (s_counts x)) (firstn m (skipn j (steps_of u))).

(** The scale of a rank's loss, from what the rank knows: its own batch, [W], and the counts of its steps. *)
Definition scale_of_mean (W total : nat) (m : micro) : Q :=
  match m with Batch ts => (q_of (length ts) * q_of W / q_of total)%Q | Idle _ => 0%Q end.
Definition scale_of_sum (W total : nat) (m : micro) : Q :=
  match m with Batch _ => (q_of W / q_of total)%Q | Idle _ => 0%Q end.

Lemma losses_supervised : forall loss g, (forall x, length (loss x) = sup x) -> supervised (losses_of loss g) = n_supervised (count_group g).
Proof.
  intros loss g L. assert (F : length (flat_map loss g) = sum_over sup g).
  { induction g as [|x g IH]; simpl; [reflexivity|]. rewrite app_length, L, IH. reflexivity. }
  unfold losses_of, supervised, count_group. simpl. destruct g; [reflexivity|exact F].
Qed.

Section Joined.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Notation sound h0 := (Keeps.sound W cfg depth input (h0 := h0)).

Lemma counted_is_all_supervised : forall {h0} loss s r j m, (forall x, length (loss x) = sup x) -> sound h0 s -> r < W ->
  j + m <= length (steps_of (rank_of s r)) -> all_supervised (window_of W loss s j m) = counted (rank_of s r) j m.
Proof.
  intros h0 loss s r j m L R H Lj. unfold counted.
  set (own := fun i => over W (fun q => n_supervised (count_group (nth i (groups_of (rank_of s q)) [])))).
  rewrite <- (sum_over_map _ _ (fun n => n)), <- firstn_map, <- skipn_map, (map_numbered _ _ _ own), skipn_map, firstn_map, seq_part, sum_over_map; try exact Lj.
  - unfold own. rewrite sum_over_swap. unfold all_supervised, window_of. rewrite sum_over_map. apply sum_over_ext. intros q. rewrite sum_over_map. apply sum_over_ext.
    intros i. apply losses_supervised, L.
  - intros i x E. unfold own. rewrite (global_counts_are_the_sums_over_all_ranks W cfg depth input s r i x R H E). unfold sum_counts. rewrite (fold_add n_supervised) by reflexivity. apply sum_over_map.
Qed.

(** WEIGHT, for the steps that the system makes: whatever the losses of the supervised tokens are, over any [m] steps from step [j] on, with
    the counts in the steps of any one rank. *)
Theorem the_steps_of_the_system_train_on_the_global_mean : forall {h0} loss s r j m, (forall x, length (loss x) = sup x) -> sound h0 s -> r < W ->
  j + m <= length (steps_of (rank_of s r)) -> 0 < counted (rank_of s r) j m ->
  let world := window_of W loss s j m in
  let total := counted (rank_of s r) j m in
  Qeq (averaged world (fun b => scale_of_mean W total b * mean_loss b)%Q) (global_mean world) /\
  Qeq (averaged world (fun b => scale_of_sum W total b * sum_loss b)%Q) (global_mean world).
Proof.
  intros h0 loss s r j m L R H Lj T world total. pose proof (counted_is_all_supervised loss s r j m L R H Lj) as A. fold world in A. fold total in A, T.
  assert (Wa : length world = W) by (unfold world, window_of; rewrite map_length, seq_length; reflexivity).
  assert (P1 : (0 < length world)%nat) by lia. assert (P2 : (0 < all_supervised world)%nat) by lia.
  pose proof (the_average_of_the_scaled_losses_is_the_global_mean world P1 P2) as X1. pose proof (the_average_of_the_scaled_sums_is_the_global_mean world P1 P2) as X2.
  unfold mean_scale in X1. unfold sum_scale in X2. rewrite A, Wa in X1, X2. split; [exact X1|exact X2].
Qed.

(** With losses too, over steps that all ranks have planned: a rank that is lost before may never train on its part. *)
Theorem with_losses_the_steps_train_on_the_global_mean : forall loss s r j m, (forall x, length (loss x) = sup x) -> under_way W cfg depth input s -> r < W ->
  (forall q, q < W -> j + m <= length (steps_of (rank_of s q))) -> 0 < counted (rank_of s r) j m ->
  let world := window_of W loss s j m in
  let total := counted (rank_of s r) j m in
  Qeq (averaged world (fun b => scale_of_mean W total b * mean_loss b)%Q) (global_mean world) /\
  Qeq (averaged world (fun b => scale_of_sum W total b * sum_loss b)%Q) (global_mean world).
Proof.
  intros loss s r j m L [h0 [v [Rv F]]] H Lj.
  assert (Same : forall q, q < W -> steps_of (rank_of s q) = steps_of (rank_of v q)) by (intros q Hq; exact (proj1 (follows_frame W s v q F Hq))).
  assert (E : window_of W loss s j m = window_of W loss v j m).
  { apply map_ext_in. intros q Hq. apply in_seq in Hq. apply map_ext_in. intros i Hi. apply in_seq in Hi. pose proof (Lj q ltac:(lia)) as Lq. unfold groups_of.
    rewrite (Same q ltac:(lia)) in Lq |- *. rewrite !app_nth1 by (rewrite map_length; lia). reflexivity. }
  specialize (Lj r H). unfold counted. rewrite (Same r H) in Lj |- *. rewrite E. apply (the_steps_of_the_system_train_on_the_global_mean loss v r j m L Rv H Lj).
Qed.

End Joined.

(** ** The shipped configuration *)

Section Shipped.
Variables (shape : layout) (C : nat -> nat) (W size ramp max_age print : nat).
(** The largest budget with its limits, and the share of a budget that may be padding ([padding_share] is the divisor). The budget under
    which each rank begins and those that it accepts in each round are arbitrary. *)
Variables (whole padding_share : nat) (limits : list nat) (first : nat -> nat) (accepts : nat -> nat -> nat).
Variables (is_quota : bool) (quota : option nat) (rule : offer -> nat) (o : order).
(** The ranks whose windows are bounded in bytes. *)
Variables (windowed : nat -> bool) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis some : 1 <= W.
Hypothesis costs_grow : cost_ok C.
Hypothesis old : 1 <= max_age.
Hypothesis bounded : within_bounds rule.

Notation one := (shipped shape C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o windowed).
Notation all := (fun _ : nat => one).

Theorem ranks_with_the_shipped_configuration_meet_every_assumption : setting_ok W all.
Proof. constructor; auto. intros r _. apply the_shipped_configuration_meets_every_assumption; assumption. Qed.

(** The budget in force on a rank in a round (R15.1). In the first round it is the smaller of the whole budget and what the rank accepts
    when it begins. Afterwards it is the least of the whole and of what any rank accepted when it offered in the round before. *)
Definition least_of (k : nat) : nat := fold_right Nat.min whole (map (fun q => accepts q k) (seq 0 W)).
Definition budget_in_force (r k : nat) : nat := match k with 0 => Nat.min (first r) whole | S j => least_of j end.
Definition limits_in_force (r k : nat) : list nat :=
  if budget_in_force r k <? whole then map (fun limit => Nat.max 1 (Nat.div (limit * budget_in_force r k) whole)) limits else limits.

Lemma offered_least : forall l m, budget_of whole (fold_left min_opt (map (offered whole) l) m) = Nat.min (budget_of whole m) (fold_right Nat.min whole l).
Proof.
  induction l as [|n l IH]; intros m; simpl; [destruct m; simpl; lia|]. rewrite IH.
  assert (X : budget_of whole (min_opt m (offered whole n)) = Nat.min (budget_of whole m) (Nat.min n whole)).
  { unfold offered. destruct (n <? whole) eqn:E; [apply Nat.ltb_lt in E|apply Nat.ltb_ge in E]; destruct m; simpl; lia. }
  rewrite X. clear. assert (fold_right Nat.min whole l <= whole) by (induction l; simpl; lia). lia.
Qed.

Lemma limits_by_budget : forall b, limits_of whole limits b =
  if budget_of whole b <? whole then map (fun limit => Nat.max 1 (Nat.div (limit * budget_of whole b) whole)) limits else limits.
Proof.
  intros [n|]; simpl; [|rewrite Nat.ltb_irrefl; reflexivity]. destruct (n <? whole) eqn:E.
  - apply Nat.ltb_lt in E. rewrite Nat.min_l by lia. replace (n <? whole) with true by (symmetry; apply Nat.ltb_lt, E). reflexivity.
  - apply Nat.ltb_ge in E. rewrite Nat.min_r by lia. rewrite Nat.ltb_irrefl. reflexivity.
Qed.

Lemma the_budget_in_force_by_round : forall c, c_first c = (fun r => offered whole (first r)) -> c_accepts c = (fun r k => offered whole (accepts r k)) ->
  setting_ok W (fun _ => c) -> forall v r x, System.reachable W (fun _ => c) depth input v -> r < W -> In x (steps_of (rank_of v r)) ->
  budget_of whole (in_force c r (results v) (s_round x)) = budget_in_force r (s_round x).
Proof.
  intros c Ef Ea ok v r x R H Ix. destruct (s_round x) as [|k] eqn:Ex;
    [simpl; rewrite Ef; unfold offered; destruct (Nat.ltb_spec (first r) whole); simpl; lia|].
  rewrite (the_budget_in_force_is_the_least_that_any_rank_accepted_the_round_before W (fun _ => c) depth input ok v r x k R H Ix Ex). unfold least_accepted.
  rewrite Ea, <- (map_map (fun q => accepts q k) (offered whole)), offered_least. simpl. apply Nat.min_r.
  unfold least_of. induction (map (fun q => accepts q k) (seq 0 W)) as [|n l IH]; simpl; lia.
Qed.

(** BUDGET in every step of every rank, with losses or without, with any windows, and with a shared order or without. The budget is the one
    in force in the step's round. *)
Theorem every_batch_of_the_shipped_configuration_keeps_the_budget : forall shares windows updates, let cfg := fun _ : nat => with_reading shares windows updates one in
  setting_ok W cfg -> forall u r, lossy_reachable W cfg depth input u -> r < W ->
  Forall (fun x => let b := budget_in_force r (s_round x) in fits_in shape b (most_padding o padding_share b) (limits_in_force r (s_round x)) (s_group x)) (steps_of (rank_of u r)).
Proof.
  intros shares windows updates cfg ok u r Ru H.
  destruct (a_run_with_losses_follows_a_run_without W cfg depth input ok u Ru) as [v [R F]]. destruct (follows_frame W u v r F H) as [-> _].
  pose proof (every_batch_keeps_what_grouping_gives_under_the_budget_in_force W cfg depth input ok
    (fun b => fits_in shape (budget_of whole b) (most_padding o padding_share (budget_of whole b)) (limits_of whole limits b))
    (fun q b w _ => in_every_order_every_group_fits_the_budget o shape padding_share (budget_of whole b) (limits_of whole limits b) w)
    (fun q b k gs t d _ G => in_every_order_an_alignment_keeps_the_budget o shape C k _ _ _ gs t d costs_grow G) v r R H) as Z.
  rewrite Forall_forall in *. intros x Ix. specialize (Z x Ix). cbv beta in Z. rewrite limits_by_budget in Z.
  unfold limits_in_force. rewrite <- (the_budget_in_force_by_round (with_reading shares windows updates one) eq_refl eq_refl ok v r x R H Ix). exact Z.
Qed.

(** ORDER in the order sampler, with losses or without: whatever is carried, split, cut by a quota or idle, each rank plans its input from
    the first sample on, and no position is in a later step than a greater one. *)
Theorem in_the_order_sampler_ranks_plan_their_input_in_order : o = Sampler -> (forall r, r < W -> rising (input r)) ->
  forall u r, lossy_reachable W all depth input u -> r < W ->
  samples_of (steps_of (rank_of u r)) = firstn (length (samples_of (steps_of (rank_of u r)))) (input r) /\
  StronglySorted (fun x y => forall a b, In a (s_group x) -> In b (s_group y) -> pos a < pos b) (steps_of (rank_of u r)).
Proof.
  intros Eo A u r Ru H. pose proof ranks_with_the_shipped_configuration_meet_every_assumption as ok.
  assert (G : forall q b w, q < W -> concat (c_group one b w) = by_position w).
  { intros q b w _. rewrite Eo. simpl. apply runs_laid_end_to_end_are_the_window_by_position. }
  assert (Al : forall q k gs t d, q < W -> Forall (fun g => g <> []) gs -> rising (concat gs) ->
    concat (fst (c_align one k gs t d)) ++ snd (c_align one k gs t d) = concat gs).
  { intros q k gs t d _ F As. rewrite Eo. simpl. apply an_alignment_by_place_leaves_samples_in_their_order; [|exact F|exact As].
    apply every_layout_and_cost_measures_groups_as_is_asked, costs_grow. }
  split.
  - exact (in_the_order_sampler_the_steps_are_the_first_of_the_input W all depth input ok G Al A u r Ru H).
  - exact (in_the_order_sampler_no_position_is_in_a_later_step_than_a_greater_one W all depth input ok G Al A u r Ru H).
Qed.

Theorem the_shipped_configuration_makes_no_more_rounds_than_the_largest_shard_has_samples : forall largest, is_quota = false -> quota = None ->
  (forall r, r < W -> length (input r) <= largest) -> forall s r, System.reachable W all depth input s -> r < W ->
  round (rank_of s r) <= largest /\ length (log s) <= 2 * largest + 2.
Proof.
  intros largest Q1 Q2 L s r R H. apply (join_mode_has_no_more_rounds_than_the_largest_shard_has_samples W all depth input ranks_with_the_shipped_configuration_meet_every_assumption); auto.
  intros _ k gs t d _ L'. simpl. destruct (carried_in o (gauge_of shape C) k gs t d) as [way ->]. apply an_alignment_carries_only_surplus_groups, L'.
Qed.

End Shipped.
