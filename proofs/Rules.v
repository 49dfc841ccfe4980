(** The shipped target rules of odb_ref/core/batching/rules.py lie within the bounds, on every agreement that can arise. *)
Require Import List Arith Lia.
From ODB Require Import Lists Types Alignment Machine Local.
Import ListNotations.

Definition paper_rule (a : offer) : nat := o_groups_max a.

Definition odb_rule (a : offer) : nat :=
  Nat.max (match o_groups_min a with Some g => g | None => o_groups_max a end) (o_due_max a).

Theorem the_paper_rule_lies_within_the_bounds : within_bounds paper_rule.
Proof. intros a [S G D M]. unfold paper_rule. lia. Qed.

Theorem the_default_rule_lies_within_the_bounds : within_bounds odb_rule.
Proof. intros a [S G D M]. unfold odb_rule. destruct (o_groups_min a) as [g|]; [specialize (M g eq_refl)|]; lia. Qed.

(** In a round of the ramp, while some source has not ended: a quarter of what the rule gives, but at least all that is due (R3.3). *)
Definition ramped (ramp : nat) (rule : offer -> nat) (a : offer) : nat :=
  match o_groups_min a with
  | Some _ => if o_round_min a <? ramp then Nat.max (Nat.max 1 (o_due_max a)) (Nat.div (rule a) 4) else rule a
  | None => rule a
  end.

Theorem a_rule_lowered_by_the_ramp_lies_within_the_bounds : forall ramp rule, within_bounds rule -> within_bounds (ramped ramp rule).
Proof.
  intros ramp rule W a S. specialize (W a S). unfold ramped. destruct (o_groups_min a); [|exact W]. destruct (o_round_min a <? ramp); [|exact W].
  pose proof (Nat.div_le_upper_bound (rule a) 4 (rule a)). lia.
Qed.

Theorem a_clamped_rule_lies_within_the_bounds : forall wish : offer -> nat,
  within_bounds (fun a => Nat.min (Nat.max (wish a) (Nat.max 1 (o_due_max a))) (o_samples_max a)).
Proof. intros wish a [S G D M]. lia. Qed.
