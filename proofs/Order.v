(** The order of a round's steps, odb_ref/core/batching/order.py: shuffled by a permutation that all ranks compute alike.
    Spec: R4.8, R4.9.

    [before k i j] tells whether place [i] comes before place [j] in round [k]. The shipped code compares hashes of the places. The
    theorems hold for any comparison; to compare the numbers themselves gives "fullest first". *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment.
Import ListNotations.

Definition permutation (before : nat -> nat -> nat -> bool) (k t : nat) : list nat := sort_by (before k) (seq 0 t).

(** The steps at the places listed in [p]; idle steps last. *)
Definition arrange (p : list nat) (steps : list group) : list group :=
  let filled := filter is_filled (map (fun i => nth i steps []) p) in
  filled ++ repeat [] (length steps - length filled).

Theorem a_permutation_has_each_place_once : forall before k t, Permutation (permutation before k t) (seq 0 t).
Proof. intros. apply sort_by_perm. Qed.

Lemma places_perm : forall p (steps : list group), Permutation p (seq 0 (length steps)) -> Permutation (map (fun i => nth i steps []) p) steps.
Proof. intros p steps P. rewrite (Permutation_map _ P), map_nth_all. reflexivity. Qed.

Lemma arrange_length : forall p (steps : list group), Permutation p (seq 0 (length steps)) -> length (arrange p steps) = length steps.
Proof.
  intros p steps P. unfold arrange. rewrite app_length, repeat_length.
  pose proof (Permutation_length (filter_split _ is_filled (map (fun i => nth i steps []) p))) as L. rewrite app_length, (Permutation_length (places_perm p steps P)) in L. lia.
Qed.

Lemma arrange_perm : forall p (steps : list group), Permutation p (seq 0 (length steps)) -> Permutation (concat (arrange p steps)) (concat steps).
Proof.
  intros p steps P. unfold arrange. rewrite concat_app, concat_repeat_nil, app_nil_r, filled_concat. apply concat_perm, places_perm, P.
Qed.

Lemma arrange_keeps : forall (Q : group -> Prop) p (steps : list group), Permutation p (seq 0 (length steps)) -> Q [] ->
  Forall Q steps -> Forall Q (arrange p steps).
Proof.
  intros Q p steps P E F. apply Forall_app. split.
  - rewrite Forall_forall in *. intros g Hg. apply filter_In in Hg as [Hg _]. apply F.
    eapply Permutation_in; [apply places_perm, P|exact Hg].
  - apply Forall_repeat, E.
Qed.

(** If no step is idle, the result is the aligned steps at the places listed in the permutation. *)
Lemma arrange_all : forall p (steps : list group), Permutation p (seq 0 (length steps)) -> Forall (fun g => g <> []) steps ->
  arrange p steps = map (fun i => nth i steps []) p.
Proof.
  intros p steps P F.
  assert (A : Forall (fun g => g <> []) (map (fun i => nth i steps []) p)).
  { rewrite Forall_forall in *. intros g Hg. apply F. eapply Permutation_in; [apply places_perm, P|exact Hg]. }
  unfold arrange. rewrite (filter_all _ _ true _ (fun g I => is_filled_is g (proj1 (Forall_forall _ _) A g I))), (Permutation_length (places_perm p steps P)), Nat.sub_diag. apply app_nil_r.
Qed.

Section Shuffle.
Variables (M : gauge) (way : line).
Notation align := (align M way).

Definition shuffle (before : nat -> nat -> nat -> bool) (k : nat) (gs : list group) (t due : nat) : list group * list sample :=
  let (steps, carried) := align gs t due in (arrange (permutation before k t) steps, carried).

Lemma shuffle_fst : forall before k gs t d, fst (shuffle before k gs t d) = arrange (permutation before k t) (fst (align gs t d)).
Proof. intros. unfold shuffle. destruct (align gs t d). reflexivity. Qed.

Lemma shuffle_snd : forall before k gs t d, snd (shuffle before k gs t d) = snd (align gs t d).
Proof. intros. unfold shuffle. destruct (align gs t d). reflexivity. Qed.

Hypothesis ok : gauge_ok M.

Lemma permutation_fits : forall before k gs t d, Permutation (permutation before k t) (seq 0 (length (fst (align gs t d)))).
Proof.
  intros. rewrite an_alignment_has_exactly_the_target_number_of_steps. apply a_permutation_has_each_place_once.
Qed.

(** ** What an alignment keeps when it is shuffled *)

Theorem shuffling_keeps_the_number_of_steps : forall before k gs t d, length (fst (shuffle before k gs t d)) = t.
Proof.
  intros. rewrite shuffle_fst, arrange_length by apply permutation_fits. apply an_alignment_has_exactly_the_target_number_of_steps.
Qed.

Theorem shuffling_keeps_exactly_the_groups : forall before k gs t d,
  Permutation (concat (fst (shuffle before k gs t d)) ++ snd (shuffle before k gs t d)) (concat gs).
Proof.
  intros. rewrite shuffle_fst, shuffle_snd, (arrange_perm _ _ (permutation_fits before k gs t d)).
  apply an_alignment_emits_and_carries_exactly_its_groups.
Qed.

Lemma shuffling_leaves_no_step_idle : forall before k gs t d, Forall (fun g => g <> []) gs -> t <= length (concat gs) ->
  Forall (fun g => g <> []) (fst (shuffle before k gs t d)).
Proof.
  intros before k gs t d F Lt. pose proof (a_rank_idles_only_when_it_has_fewer_samples_than_steps M way ok gs t d F Lt) as A.
  rewrite shuffle_fst, (arrange_all _ _ (permutation_fits before k gs t d) A).
  rewrite Forall_forall in *. intros g Hg. apply A. eapply Permutation_in; [apply places_perm, permutation_fits|exact Hg].
Qed.

Theorem shuffling_keeps_what_passes_to_parts : forall before (P : group -> Prop) k gs t d, P [] -> passes_on P ->
  Forall P gs -> Forall P (fst (shuffle before k gs t d)).
Proof.
  intros. rewrite shuffle_fst. apply arrange_keeps; [apply permutation_fits|assumption|].
  apply an_alignment_keeps_what_passes_to_parts; assumption.
Qed.

(** ORDER: one permutation, the same for every rank, assigns the aligned groups to steps. *)
Theorem shuffled_steps_are_the_aligned_ones_by_one_permutation : forall before k gs t d,
  Forall (fun g => g <> []) (fst (align gs t d)) ->
  fst (shuffle before k gs t d) = map (fun i => nth i (fst (align gs t d)) []) (permutation before k t).
Proof. intros. rewrite shuffle_fst. apply arrange_all; [apply permutation_fits|assumption]. Qed.

Theorem shuffled_idle_steps_come_last : forall before k gs t d, exists filled n,
  fst (shuffle before k gs t d) = filled ++ repeat [] n /\ Forall (fun g => g <> []) filled.
Proof.
  intros. rewrite shuffle_fst. eexists _, _. split; [reflexivity|]. apply Forall_forall. intros g Hg.
  apply filter_In in Hg as [_ Hg]. destruct g; easy.
Qed.

End Shuffle.
