(** The layouts of odb_ref/core/batching/layouts.py and the costs of cost.py. The costs that ship meet [cost_ok], and with any such
    cost each layout measures groups as Alignment.v requires. Spec: R2.4, R2.7, R4.2. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Grouping Packing Alignment Order.
Import ListNotations.

(** ** Costs *)

(** The cost of a sample of [n] tokens: at least 1, and no less for a longer sample. *)
Record cost_ok (C : nat -> nat) : Prop := {
  cost_is_positive : forall n, 1 <= n -> 1 <= C n;
  cost_does_not_fall : forall n k, n <= k -> C n <= C k }.

Definition tokens_cost (n : nat) : nat := n.
Definition attention_cost (q n : nat) : nat := n + Nat.div (n * n) q.

Theorem the_shipped_costs_meet_every_assumption : cost_ok tokens_cost /\ forall q, cost_ok (attention_cost q).
Proof.
  split; [constructor; unfold tokens_cost; auto|]. intros q. unfold attention_cost. constructor; [intros n L; lia|]. intros n k L.
  apply Nat.add_le_mono; [exact L|]. destruct q as [|q]; [reflexivity|]. apply Nat.div_le_mono; [discriminate|]. apply Nat.mul_le_mono; exact L.
Qed.

(** ** Layouts *)

(** A row for each sample, all as long as the longest; or one row, in which samples are laid end to end. *)
Inductive layout := Padded | Packed.

(** The cost of a row: the sum over its samples. *)
Notation row_cost C := (sum_over (fun x => C (len x))).

(** The smallest number of first samples that together cost [half], but never all samples. *)
Fixpoint reach (C : nat -> nat) (half : nat) (g : group) : nat :=
  match g with
  | [] => 0
  | x :: r => match r with [] => 0 | _ => if half <=? C (len x) then 1 else S (reach C (half - C (len x)) r) end
  end.

Definition gauge_of (l : layout) (C : nat -> nat) : gauge :=
  match l with
  | Padded => mkGauge padded (fun g => length g * C (longest g)) (fun g => Nat.div2 (S (length g)))
  | Packed => mkGauge total (row_cost C) (fun g => reach C (Nat.div2 (S (row_cost C g))) g)
  end.

Definition form (l : layout) : nat -> nat -> list nat -> list sample -> list group :=
  match l with Padded => compute_groups | Packed => fun b _ => compute_rows b end.

(** BUDGET: a group of two or more samples has no more tokens than the budget, of which at most [most] are padding (a row has none), and
    keeps every limit. A single sample may exceed them. *)
Definition fits_in (l : layout) (budget most : nat) (limits : list nat) (g : group) : Prop :=
  let tokens := tokens_of (gauge_of l tokens_cost) g in length g <= 1 \/ (tokens <= budget /\ tokens - total g <= most /\ is_within limits g = true).

(** ** Forming groups *)

Lemma fits_packed_is_fits_in : forall b most limits g, fits_packed b limits g <-> fits_in Packed b most limits g.
Proof.
  intros b most limits g. unfold fits_packed, fits_in, is_roomy. simpl. rewrite andb_true_iff, Nat.leb_le. intuition lia.
Qed.

Theorem in_either_layout_every_group_fits_the_budget : forall l b most limits w, Forall (fits_in l b most limits) (form l b most limits w).
Proof.
  intros [|] b most limits w; [exact (every_group_fits_the_budget b most limits w)|]. simpl.
  eapply Forall_impl; [|apply every_row_fits_the_budget]. intros g. apply fits_packed_is_fits_in.
Qed.

Theorem in_either_layout_groups_hold_exactly_the_window : forall l b most limits w,
  Permutation (concat (form l b most limits w)) w /\ Forall (fun g => g <> []) (form l b most limits w).
Proof.
  intros [|] b most limits w; simpl; auto using groups_hold_exactly_the_window, no_group_is_empty, rows_hold_exactly_the_window, no_row_is_empty.
Qed.

Lemma fits_in_passes_on : forall l b most limits, passes_on (fits_in l b most limits).
Proof.
  intros [|] b most limits part rest g P; [apply fits_part with (rest := rest); exact P|].
  intros [F|[F [_ Wa]]]; [left|right].
  - apply Permutation_length in P. rewrite app_length in P. lia.
  - simpl in *. rewrite <- (sum_over_perm len P), sum_over_app in F. split; [lia|]. split; [lia|].
    eapply is_within_le; [|exact Wa]. intros r. rewrite <- (sum_over_perm _ P), sum_over_app. lia.
Qed.

(** ** Costs of groups *)

Lemma reach_step : forall C half x y g, reach C half (x :: y :: g) =
  if half <=? C (len x) then 1 else S (reach C (half - C (len x)) (y :: g)).
Proof. reflexivity. Qed.

Lemma reach_bounds : forall C g half, 2 <= length g -> 1 <= reach C half g < length g.
Proof.
  intros C g. induction g as [|x g IH]; intros half L; [simpl in L; lia|]. destruct g as [|y g]; [simpl in L; lia|].
  rewrite reach_step. destruct (half <=? C (len x)); [simpl; lia|]. destruct g as [|z g]; [simpl; lia|].
  specialize (IH (half - C (len x)) ltac:(simpl; lia)). simpl length in *. lia.
Qed.

(** With any such cost, each layout meets [gauge_ok]. *)
Theorem every_layout_and_cost_measures_groups_as_is_asked : forall l C, cost_ok C -> gauge_ok (gauge_of l C).
Proof.
  intros [|] C [Po Mo]; constructor; cbn [gauge_of middle_of cost_of]; auto.
  - intros g L. pose proof (Nat.div2_odd (S (length g))) as O. destruct (Nat.odd (S (length g))); simpl Nat.b2n in O; lia.
  - intros part rest g P. rewrite <- (longest_perm _ _ P), longest_app. apply Permutation_length in P. rewrite app_length in P.
    apply Nat.mul_le_mono; [lia|]. apply Mo. lia.
  - intros g L. apply reach_bounds, L.
  - intros part rest g P. rewrite <- (sum_over_perm _ P), sum_over_app. lia.
Qed.

(** If each sample has a token, a part that lacks a sample costs less than the whole group. So splitting the most costly group evens out. *)
Theorem a_part_costs_less_than_the_whole : forall l C part rest g, cost_ok C -> (forall x, In x g -> 1 <= len x) ->
  Permutation (part ++ rest) g -> rest <> [] -> cost_of (gauge_of l C) part < cost_of (gauge_of l C) g.
Proof.
  intros l C part rest g [Po Mo] Ln P NE. destruct rest as [|x rest]; [easy|].
  assert (Lx : 1 <= len x) by (apply Ln; eapply Permutation_in; [exact P|]; apply in_or_app; right; left; reflexivity).
  destruct l; simpl.
  - rewrite <- (longest_perm _ _ P), longest_app. apply Permutation_length in P. rewrite app_length in P. simpl in P |- *.
    set (most := Nat.max (longest part) (Nat.max (len x) (longest rest))).
    assert (1 <= C most) by (apply Po; unfold most; lia). assert (C (longest part) <= C most) by (apply Mo; unfold most; lia).
    assert (length part * C (longest part) <= length part * C most) by (apply Nat.mul_le_mono_l; assumption). nia.
  - rewrite <- (sum_over_perm _ P), sum_over_app. simpl. specialize (Po _ Lx). lia.
Qed.

(** If the first part of a row does not cost half of the row, it lacks only the last sample. Any shorter first part costs less than half. *)
Theorem the_first_part_of_a_row_is_the_fewest_samples_that_cost_half : forall C g, 2 <= length g ->
  let middle := middle_of (gauge_of Packed C) g in let half := Nat.div2 (S (row_cost C g)) in
  (half <= row_cost C (firstn middle g) \/ S middle = length g) /\
  forall fewer, 1 <= fewer < middle -> row_cost C (firstn fewer g) < half.
Proof.
  intros C g L. cbn beta iota zeta delta [middle_of gauge_of]. generalize (Nat.div2 (S (row_cost C g))) as half. revert L.
  induction g as [|x g IH]; intros L half; [simpl in L; lia|]. destruct g as [|y g]; [simpl in L; lia|].
  rewrite reach_step. destruct (half <=? C (len x)) eqn:E.
  - apply Nat.leb_le in E. split; [left; simpl; lia|]. intros fewer F. lia.
  - apply Nat.leb_gt in E. destruct g as [|z g].
    + split; [right; reflexivity|]. intros fewer F. change (reach C (half - C (len x)) [y]) with 0 in F. lia.
    + destruct (IH ltac:(simpl; lia) (half - C (len x))) as [I1 I2].
      set (n := reach C (half - C (len x)) (y :: z :: g)) in *. split.
      * rewrite firstn_cons. change (row_cost C (x :: firstn n (y :: z :: g))) with (C (len x) + row_cost C (firstn n (y :: z :: g))).
        destruct I1 as [I1|I1]; [left; lia|right; simpl length in *; lia].
      * intros [|fewer] F; [lia|]. rewrite firstn_cons.
        change (row_cost C (x :: firstn fewer (y :: z :: g))) with (C (len x) + row_cost C (firstn fewer (y :: z :: g))).
        destruct fewer as [|fewer]; [simpl; lia|]. specialize (I2 (S fewer)). lia.
Qed.

(** ** BUDGET, aligned and shuffled *)

Theorem an_alignment_keeps_the_budget : forall l C way b most limits gs target due, cost_ok C -> Forall (fits_in l b most limits) gs ->
  Forall (fits_in l b most limits) (fst (align (gauge_of l C) way gs target due)).
Proof.
  intros. apply an_alignment_keeps_what_passes_to_parts; [left; simpl; lia|apply fits_in_passes_on|assumption].
Qed.

Theorem shuffling_keeps_the_budget : forall l C way before k b most limits gs t d, cost_ok C -> Forall (fits_in l b most limits) gs ->
  Forall (fits_in l b most limits) (fst (shuffle (gauge_of l C) way before k gs t d)).
Proof.
  intros. apply shuffling_keeps_what_passes_to_parts; [left; simpl; lia|apply fits_in_passes_on|assumption].
Qed.
