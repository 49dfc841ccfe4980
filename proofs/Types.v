(** The nouns of the protocol: samples and groups. Spec: R1.1, R1.2. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists.
Import ListNotations.

(** [pos] is the sample's place in its rank's sampler order; [len] counts its tokens and [sup] its supervised tokens; [costs] lists how
    much it uses of each further resource. *)
Record sample := mkSample { sid : nat; pos : nat; len : nat; sup : nat; costs : list nat }.

Notation group := (list sample).

(** The length of the longest sample, or 0 for an empty group. *)
Fixpoint longest (g : group) : nat :=
  match g with [] => 0 | x :: r => Nat.max (len x) (longest r) end.

(** The tokens of the collated batch, with padding: the mathematical definition. *)
Definition padded (g : group) : nat := length g * longest g.

(** The same as the Python computes it, from the first sample, which is the longest. *)
Definition padded_first (g : group) : nat :=
  match g with [] => 0 | x :: _ => length g * len x end.

(** How much a group uses of resource [r]: a sum, without padding. *)
Notation used r := (sum_over (fun x => nth r (costs x) 0)).

(** The tokens of a row, in which samples are laid end to end. *)
Notation total := (sum_over len).

(** The group uses no more of any resource than its limit. *)
Definition is_within (limits : list nat) (g : group) : bool :=
  forallb (fun '(r, limit) => used r g <=? limit) (combine (seq 0 (length limits)) limits).

(** BUDGET: a group of two or more samples fits the padded budget, has at most [most] tokens of padding, and keeps every limit. A
    single sample may exceed all of them. *)
Definition fits (budget most : nat) (limits : list nat) (g : group) : Prop :=
  length g <= 1 \/ (padded g <= budget /\ padded g - total g <= most /\ is_within limits g = true).

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

Lemma total_bound : forall g n, longest g <= n -> total g <= length g * n.
Proof. induction g as [|x g IH]; simpl; intros n L; [lia|]. specialize (IH n ltac:(lia)). lia. Qed.

Lemma is_within_le : forall limits g h, (forall r, used r g <= used r h) -> is_within limits h = true -> is_within limits g = true.
Proof.
  intros limits g h L. unfold is_within. rewrite !forallb_forall. intros H [r limit] I.
  specialize (H _ I). apply Nat.leb_le in H. apply Nat.leb_le. specialize (L r). lia.
Qed.

(** Fitting is hereditary: part of a group that fits also fits. FEWEST and splitting rest on this. *)
Lemma fits_part : forall b most limits g rest h, Permutation (g ++ rest) h -> fits b most limits h -> fits b most limits g.
Proof.
  intros b most limits g rest h P F. pose proof (Permutation_length P) as L. rewrite app_length in L.
  destruct F as [F|[F [Pa Wa]]]; [left; lia|right]. rewrite <- and_assoc. split.
  - unfold padded in *. rewrite <- (sum_over_perm len P), sum_over_app in Pa. rewrite <- (longest_perm _ _ P), longest_app, <- L in *.
    pose proof (total_bound rest (Nat.max (longest g) (longest rest)) ltac:(lia)).
    assert (length g * longest g <= length g * Nat.max (longest g) (longest rest)) by (apply Nat.mul_le_mono_l; lia). lia.
  - eapply is_within_le; [|exact Wa]. intros r. rewrite <- (sum_over_perm _ P), sum_over_app. lia.
Qed.

Lemma fits_perm : forall b most limits g h, Permutation g h -> fits b most limits g -> fits b most limits h.
Proof. intros b most limits g h P. apply fits_part with (rest := []). rewrite app_nil_r. symmetry. exact P. Qed.

Lemma concat_of_nonempty : forall gs : list group, Forall (fun g => g <> []) gs -> length gs <= length (concat gs).
Proof. induction 1 as [|g gs Hg F IH]; simpl; [lia|]. rewrite app_length. destruct g; [easy|]. simpl. lia. Qed.

Definition is_filled (g : group) : bool := match g with [] => false | _ => true end.

Lemma is_filled_is : forall g, g <> [] -> is_filled g = true.
Proof. intros [|x g] H; [contradiction|reflexivity]. Qed.

Lemma filled_concat : forall gs : list group, concat (filter is_filled gs) = concat gs.
Proof. induction gs as [|[|x g] gs IH]; simpl; congruence. Qed.
