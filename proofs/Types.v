(** The nouns of the protocol: samples and groups. Spec: R1.1, R1.2. *)
Require Import List Arith Lia Permutation.
Import ListNotations.

(** [pos] is the sample's place in its rank's sampler order; [len] counts tokens, [sup] the supervised ones. *)
Record sample := mkSample { sid : nat; pos : nat; len : nat; sup : nat }.

Notation group := (list sample).

(** The longest sample of a group, 0 when it is empty. *)
Fixpoint longest (g : group) : nat :=
  match g with [] => 0 | x :: r => Nat.max (len x) (longest r) end.

(** Padded tokens of the collated batch, as the mathematics has them. *)
Definition padded (g : group) : nat := length g * longest g.

(** Padded tokens as the Python computes them: the first sample is the longest. *)
Definition padded_first (g : group) : nat :=
  match g with [] => 0 | x :: _ => length g * len x end.

(** BUDGET: a group of more than one sample fits the padded budget; a single sample may be longer. *)
Definition fits (budget : nat) (g : group) : Prop := length g <= 1 \/ padded g <= budget.

Lemma longest_le : forall g x, In x g -> len x <= longest g.
Proof. induction g as [|y g IH]; simpl; intros x H; [easy|]. destruct H as [->|H]; [lia|]. specialize (IH x H). lia. Qed.

Lemma longest_bound : forall g n, (forall x, In x g -> len x <= n) -> longest g <= n.
Proof.
  induction g as [|y g IH]; simpl; intros n H; [lia|].
  assert (len y <= n) by (apply H; auto). assert (longest g <= n) by (apply IH; auto). lia.
Qed.

Lemma longest_incl : forall g h, incl g h -> longest g <= longest h.
Proof. intros g h H. apply longest_bound. intros x Hx. apply longest_le, H, Hx. Qed.

Lemma longest_perm : forall g h, Permutation g h -> longest g = longest h.
Proof.
  intros g h H. apply Nat.le_antisymm; apply longest_incl; intros x Hx.
  - eapply Permutation_in; eauto.
  - eapply Permutation_in; [apply Permutation_sym|]; eauto.
Qed.

Lemma longest_app : forall g h, longest (g ++ h) = Nat.max (longest g) (longest h).
Proof. induction g as [|x g IH]; simpl; intros h; [reflexivity|]. rewrite IH. lia. Qed.

Lemma fits_perm : forall b g h, Permutation g h -> fits b g -> fits b h.
Proof.
  intros b g h H [F|F]; [left|right].
  - rewrite <- (Permutation_length H). exact F.
  - unfold padded in *. rewrite <- (Permutation_length H), <- (longest_perm _ _ H). exact F.
Qed.

(** Fitting is hereditary: part of a group that fits, fits. The root of FEWEST and of splitting. *)
Lemma fits_part : forall b g h, length g <= length h -> incl g h -> fits b h -> fits b g.
Proof.
  intros b g h L I [F|F]; [left; lia|].
  right. unfold padded in *. apply Nat.le_trans with (length h * longest h); [|exact F].
  apply Nat.mul_le_mono; [exact L | apply longest_incl, I].
Qed.

Lemma concat_perm : forall (A : Type) (g h : list (list A)), Permutation g h -> Permutation (concat g) (concat h).
Proof.
  induction 1; simpl; auto.
  - apply Permutation_app_head, IHPermutation.
  - rewrite !app_assoc. apply Permutation_app_tail, Permutation_app_comm.
  - eapply Permutation_trans; eauto.
Qed.
