(** WEIGHT over the rationals: the average over ranks of the scaled losses is the mean over all supervised tokens, with idle ranks, steps
    without supervised tokens, and updates of several micro-steps. What holds of losses holds of gradients, component by component, because
    both are linear. The scale is that of odb_ref/core/batching/weighting.py, mode exact. *)
Require Import List QArith Qfield Lia.
From ODB Require Import Lists.
Import ListNotations.
Open Scope Q_scope.

(** One micro-step of one rank: the losses of its supervised tokens, or a replayed batch with any loss. *)
Inductive micro := Batch (tokens : list Q) | Idle (replayed : Q).

Definition q_of (n : nat) : Q := inject_Z (Z.of_nat n).
Definition q_sum (l : list Q) : Q := fold_right Qplus 0 l.

Definition tokens_of (m : micro) : list Q := match m with Batch ts => ts | Idle _ => [] end.
Definition supervised (m : micro) : nat := length (tokens_of m).

(** What the loss function returns: a mean or a sum. A batch without supervised tokens may return anything; in the model [0/0 = 0]. *)
Definition mean_loss (m : micro) : Q := match m with Batch ts => q_sum ts / q_of (length ts) | Idle x => x end.
Definition sum_loss (m : micro) : Q := match m with Batch ts => q_sum ts | Idle x => x end.

(** A rank's update is a list of micro-steps; the world is a list of ranks. *)
Definition all_supervised (world : list (list micro)) : nat := sum_over (sum_over supervised) world.

Definition mean_scale (world : list (list micro)) (m : micro) : Q :=
  match m with Batch ts => q_of (length ts) * q_of (length world) / q_of (all_supervised world) | Idle _ => 0 end.
Definition sum_scale (world : list (list micro)) (m : micro) : Q :=
  match m with Batch _ => q_of (length world) / q_of (all_supervised world) | Idle _ => 0 end.

(** Ranks are averaged (DDP, FSDP), micro-steps are added. *)
Definition averaged (world : list (list micro)) (term : micro -> Q) : Q :=
  q_sum (map (fun w => q_sum (map term w)) world) / q_of (length world).

Definition all_tokens (world : list (list micro)) : list Q := flat_map (flat_map tokens_of) world.

Definition global_mean (world : list (list micro)) : Q := q_sum (all_tokens world) / q_of (length (all_tokens world)).

Lemma q_sum_app : forall a b, q_sum (a ++ b) == q_sum a + q_sum b.
Proof. induction a as [|x a IH]; intros b; simpl; [ring|]. rewrite IH. ring. Qed.

Lemma q_of_pos : forall n, (0 < n)%nat -> ~ q_of n == 0.
Proof. intros n H E. unfold q_of, Qeq in E. simpl in E. lia. Qed.

Lemma q_sum_ext : forall (A : Type) (f g : A -> Q) l, (forall x, In x l -> f x == g x) -> q_sum (map f l) == q_sum (map g l).
Proof. induction l as [|x l IH]; intros H; simpl; [reflexivity|]. rewrite (H x (or_introl eq_refl)), IH; [reflexivity|]. intros; apply H; right; assumption. Qed.

Lemma q_sum_scale : forall (A : Type) (f : A -> Q) c l, q_sum (map (fun x => c * f x) l) == c * q_sum (map f l).
Proof. induction l as [|x l IH]; simpl; [ring|]. rewrite IH. ring. Qed.

Lemma q_sum_flat : forall (A : Type) (f : A -> list Q) l, q_sum (flat_map f l) == q_sum (map (fun x => q_sum (f x)) l).
Proof. induction l as [|x l IH]; simpl; [reflexivity|]. rewrite q_sum_app, IH. reflexivity. Qed.

Lemma flat_map_len : forall (A : Type) (f : A -> list Q) l, length (flat_map f l) = sum_over (fun x => length (f x)) l.
Proof. induction l as [|x l IH]; simpl; [reflexivity|]. rewrite app_length, IH. reflexivity. Qed.

Lemma all_tokens_length : forall world, length (all_tokens world) = all_supervised world.
Proof. intros. unfold all_tokens. rewrite flat_map_len. apply sum_over_ext. intros w. apply flat_map_len. Qed.

Lemma averaged_of_shares : forall world term, (0 < length world)%nat -> (0 < all_supervised world)%nat ->
  (forall m, term m == q_of (length world) / q_of (all_supervised world) * q_sum (tokens_of m)) ->
  averaged world term == global_mean world.
Proof.
  intros world term Wa T H. unfold averaged, global_mean. rewrite all_tokens_length.
  assert (E : q_sum (map (fun w => q_sum (map term w)) world) == q_of (length world) / q_of (all_supervised world) * q_sum (all_tokens world)).
  { unfold all_tokens. rewrite q_sum_flat, <- q_sum_scale. apply q_sum_ext. intros w _. rewrite q_sum_flat, <- q_sum_scale. apply q_sum_ext. intros m _. apply H. }
  rewrite E. field. split; apply q_of_pos; assumption.
Qed.

(** WEIGHT, mean-reduced loss. *)
Theorem the_average_of_the_scaled_losses_is_the_global_mean : forall world, (0 < length world)%nat -> (0 < all_supervised world)%nat ->
  averaged world (fun m => mean_scale world m * mean_loss m) == global_mean world.
Proof.
  intros world Wa T. apply averaged_of_shares; [exact Wa|exact T|]. intros [ts|x]; simpl.
  - destruct ts as [|t ts]; [unfold q_of at 1; simpl; unfold Qdiv at 1; ring_simplify; reflexivity|].
    field. split; apply q_of_pos; [exact T|simpl; lia].
  - ring.
Qed.

(** WEIGHT, sum-reduced loss. *)
Theorem the_average_of_the_scaled_sums_is_the_global_mean : forall world, (0 < length world)%nat -> (0 < all_supervised world)%nat ->
  averaged world (fun m => sum_scale world m * sum_loss m) == global_mean world.
Proof. intros world Wa T. apply averaged_of_shares; [exact Wa|exact T|]. intros [ts|x]; simpl; ring. Qed.

(** WEIGHT, for a trainer that itself divides each loss by the [k] micro-steps of the update: the scale is [k] times as large. *)
Theorem a_trainer_that_divides_by_the_micro_steps_gets_the_global_mean_too : forall world k, (0 < k)%nat -> (0 < length world)%nat -> (0 < all_supervised world)%nat ->
  averaged world (fun m => q_of k * mean_scale world m * mean_loss m / q_of k) == global_mean world.
Proof.
  intros world k K Wa T. rewrite <- (the_average_of_the_scaled_losses_is_the_global_mean world Wa T). unfold averaged.
  assert (E : q_sum (map (fun w => q_sum (map (fun m => q_of k * mean_scale world m * mean_loss m / q_of k) w)) world) ==
              q_sum (map (fun w => q_sum (map (fun m => mean_scale world m * mean_loss m) w)) world)).
  { apply q_sum_ext. intros w _. apply q_sum_ext. intros m _. field. apply q_of_pos, K. }
  rewrite E. reflexivity.
Qed.

(** Without supervised tokens in an update, every scaled loss is 0. *)
Theorem an_update_without_supervised_tokens_has_loss_zero : forall world m, all_supervised world = 0%nat ->
  mean_scale world m * mean_loss m == 0 /\ sum_scale world m * sum_loss m == 0.
Proof.
  intros world m T. unfold mean_scale, sum_scale. rewrite T. destruct m as [ts|x]; simpl; split; try ring; unfold Qdiv; change (q_of 0) with 0; change (/ 0) with 0; ring.
Qed.
