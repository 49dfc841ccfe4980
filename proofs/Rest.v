(** RESUME with another number of ranks (R10.3): the items that no rank had taken are shared out anew, in the order of the epoch.

    This is Generation.compute_rest of odb_ref/torch/plan/state.py, without samples set aside, and the arithmetic of its shares. The items
    taken and the items left are together all items. [Resume.v] joins this to the steps of a system. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment.
Import ListNotations.

(** The items of a list at the given places, in their order. *)
Definition pick {A} (l : list A) (places : list nat) : list A :=
  flat_map (fun i => match nth_error l i with Some x => [x] | None => [] end) places.

(** range(r, n, world): the places of rank [r] in an order of [n]. *)
Definition share_of (world r n : nat) : list nat := filter (fun i => i mod world =? r) (seq 0 n).

(** What a checkpoint records about a rank's positions. *)
Record checkpoint := mkCheckpoint { k_read_samples : nat; k_carried : list nat; k_taken : list nat }.

Definition among (p : nat) (l : list nat) : bool := existsb (Nat.eqb p) l.

(** Checkpoint.is_taken. *)
Definition is_taken (k : checkpoint) (p : nat) : bool :=
  if (k_read_samples k <=? p) || among p (k_carried k) then among p (k_taken k) else true.

(** Part.compute_rest: [places] are the rank's places in the order of the epoch. *)
Definition part_rest (places : list nat) (k : checkpoint) : list nat :=
  pick places (filter (fun p => negb (is_taken k p)) (k_carried k) ++
               filter (fun p => negb (among p (k_taken k))) (seq (k_read_samples k) (length places - k_read_samples k))).

Definition part_taken (places : list nat) (k : checkpoint) : list nat := pick places (filter (is_taken k) (seq 0 (length places))).

Definition ascending : list nat -> list nat := sort_by Nat.leb.

Definition by_rank {A B} (f : nat -> A -> list B) (parts : list A) : list B :=
  concat (map (fun rp => f (fst rp) (snd rp)) (combine (seq 0 (length parts)) parts)).

(** Generation.compute_rest: what is left of an order once the ranks have taken their parts. *)
Definition generation_rest {A} (parts : list checkpoint) (order : list A) : list A :=
  pick order (ascending (by_rank (fun r k => part_rest (share_of (length parts) r (length order)) k) parts)).

Definition generation_taken {A} (parts : list checkpoint) (order : list A) : list A :=
  pick order (by_rank (fun r k => part_taken (share_of (length parts) r (length order)) k) parts).

(** The same after several changes of the number of ranks. *)
Fixpoint rest_of {A} (base : list (list checkpoint)) (order : list A) : list A :=
  match base with [] => order | parts :: later => rest_of later (generation_rest parts order) end.

Fixpoint taken_of {A} (base : list (list checkpoint)) (order : list A) : list A :=
  match base with [] => [] | parts :: later => generation_taken parts order ++ taken_of later (generation_rest parts order) end.

(** What a checkpoint of a rank with [n] positions must meet: what was carried had been read, each position once. *)
Definition sound (n : nat) (k : checkpoint) : Prop :=
  k_read_samples k <= n /\ NoDup (k_carried k) /\ Forall (fun p => p < k_read_samples k) (k_carried k).

Definition sound_parts (n : nat) (parts : list checkpoint) : Prop :=
  parts <> [] /\ forall r k, nth_error parts r = Some k -> sound (length (share_of (length parts) r n)) k.

Fixpoint sound_base {A} (base : list (list checkpoint)) (order : list A) : Prop :=
  match base with [] => True | parts :: later => sound_parts (length order) parts /\ sound_base later (generation_rest parts order) end.

(** ** Lists *)

Lemma among_in : forall p l, among p l = true <-> In p l.
Proof.
  intros p l. unfold among. rewrite existsb_exists. split; [intros [x [H E]]; apply Nat.eqb_eq in E; congruence|intros H; exists p; split; [exact H|apply Nat.eqb_refl]].
Qed.

Lemma pick_app : forall A (l : list A) a b, pick l (a ++ b) = pick l a ++ pick l b.
Proof. intros. unfold pick. apply flat_map_app. Qed.

Lemma pick_perm : forall A (l : list A) a b, Permutation a b -> Permutation (pick l a) (pick l b).
Proof. intros A l a b P. unfold pick. apply Permutation_flat_map, P. Qed.

Lemma pick_all : forall A (l : list A), pick l (seq 0 (length l)) = l.
Proof.
  assert (X : forall A (l k : list A), pick (k ++ l) (seq (length k) (length l)) = l).
  { intros A. induction l as [|x l IH]; intros k; [reflexivity|]. simpl. rewrite nth_error_app2, Nat.sub_diag by lia. simpl. f_equal.
    specialize (IH (k ++ [x])). rewrite <- app_assoc, app_length, Nat.add_1_r in IH. exact IH. }
  intros A l. apply (X A l []).
Qed.

Lemma pick_pick : forall A (l : list A) a b, Forall (fun i => i < length l) a -> pick (pick l a) b = pick l (pick a b).
Proof.
  intros A l a b F. assert (E : forall i, nth_error (pick l a) i = match nth_error a i with Some j => nth_error l j | None => None end).
  { induction F as [|j a Hj F IH]; intros i; [destruct i; reflexivity|]. unfold pick in *. simpl. destruct (nth_error l j) as [x|] eqn:Ex; [|apply nth_error_None in Ex; lia].
    simpl. destruct i; simpl; [symmetry; exact Ex|apply IH]. }
  induction b as [|i b IH]; [reflexivity|]. unfold pick in *. simpl. rewrite E, flat_map_app, IH. f_equal.
  destruct (nth_error a i) as [j|]; simpl; [|reflexivity]. destruct (nth_error l j); reflexivity.
Qed.

(** ** One rank *)

Lemma part_positions : forall n k, sound n k ->
  Permutation (filter (is_taken k) (seq 0 n) ++ filter (fun p => negb (is_taken k p)) (k_carried k) ++
               filter (fun p => negb (among p (k_taken k))) (seq (k_read_samples k) (n - k_read_samples k))) (seq 0 n).
Proof.
  intros n k [L [ND F]]. rewrite <- (filter_split nat (is_taken k) (seq 0 n)) at 2. apply Permutation_app_head. rewrite Forall_forall in F.
  apply NoDup_Permutation.
  - apply NoDup_app_of; [apply NoDup_filter, ND|apply NoDup_filter, seq_NoDup|]. intros x Hx Hy. apply filter_In in Hx as [Hx _]. apply filter_In in Hy as [Hy _]. apply in_seq in Hy. specialize (F x Hx). lia.
  - apply NoDup_filter, seq_NoDup.
  - intros x. rewrite in_app_iff, !filter_In, !in_seq. unfold is_taken. split.
    + intros [[Hx T]|[Hx T]].
      * split; [specialize (F x Hx); lia|exact T].
      * split; [lia|]. destruct (k_read_samples k <=? x) eqn:E; [exact T|apply Nat.leb_gt in E; lia].
    + intros [Hx T]. destruct (k_read_samples k <=? x) eqn:E; simpl in T.
      * right. apply Nat.leb_le in E. split; [lia|exact T].
      * destruct (among x (k_carried k)) eqn:M; [|discriminate]. left. split; [apply among_in, M|]. exact T.
Qed.

Lemma part_splits : forall places k, sound (length places) k -> Permutation (part_taken places k ++ part_rest places k) places.
Proof.
  intros places k S. unfold part_taken, part_rest. rewrite <- pick_app, <- (pick_all nat places) at 1.
  rewrite pick_all. rewrite (pick_perm _ places _ _ (part_positions _ k S)), pick_all. reflexivity.
Qed.

(** ** All ranks *)

Lemma parts_by_key : forall A (f : A -> nat) l n, Permutation (concat (map (fun r => filter (fun x => f x =? r) l) (seq 0 n))) (filter (fun x => f x <? n) l).
Proof.
  intros A f l. induction n as [|n IH]; [rewrite (filter_all _ _ false) by reflexivity; reflexivity|].
  rewrite seq_S, map_app, concat_app, IH. simpl. rewrite app_nil_r. clear IH. induction l as [|x l IH]; simpl; [constructor|].
  destruct (Nat.ltb_spec (f x) n), (Nat.eqb_spec (f x) n), (Nat.ltb_spec (f x) (S n)); try lia; simpl;
    rewrite <- ?Permutation_middle, IH; reflexivity.
Qed.

Lemma shares_are_all : forall world n, 1 <= world -> Permutation (concat (map (fun r => share_of world r n) (seq 0 world))) (seq 0 n).
Proof.
  intros world n Wa. unfold share_of. rewrite (parts_by_key _ (fun i => i mod world)), (filter_all _ _ true); [reflexivity|].
  intros i _. apply Nat.ltb_lt, Nat.mod_upper_bound. lia.
Qed.

Lemma by_rank_perm : forall A B (f g : nat -> A -> list B) parts, (forall r k, nth_error parts r = Some k -> Permutation (f r k) (g r k)) ->
  Permutation (by_rank f parts) (by_rank g parts).
Proof.
  intros A B f g parts H. apply concat_perms. intros [r k] I. apply H, numbered, I.
Qed.

Lemma by_rank_app : forall A B (f g : nat -> A -> list B) parts, Permutation (by_rank f parts ++ by_rank g parts) (by_rank (fun r k => f r k ++ g r k) parts).
Proof. intros A B f g parts. symmetry. apply concat_map_app. Qed.

Lemma by_rank_of_rank : forall A B (f : nat -> list B) (parts : list A), by_rank (fun r _ => f r) parts = concat (map f (seq 0 (length parts))).
Proof.
  intros A B f parts. unfold by_rank. f_equal. assert (X : forall (parts : list A) n, map (fun rp => f (fst rp)) (combine (seq n (length parts)) parts) = map f (seq n (length parts))).
  { induction parts0 as [|k parts0 IH]; intros n; [reflexivity|]. simpl. f_equal. apply IH. }
  apply X.
Qed.

Lemma generation_splits : forall A parts (order : list A), sound_parts (length order) parts ->
  Permutation (generation_taken parts order ++ generation_rest parts order) order.
Proof.
  intros A parts order [NE S]. unfold generation_taken, generation_rest. rewrite <- pick_app. transitivity (pick order (seq 0 (length order))); [apply pick_perm|rewrite pick_all; reflexivity].
  unfold ascending. rewrite sort_by_perm, by_rank_app. rewrite (by_rank_perm _ _ _ (fun r _ => share_of (length parts) r (length order))).
  - rewrite by_rank_of_rank. apply shares_are_all. destruct parts; [easy|simpl; lia].
  - intros r k E. apply part_splits, S, E.
Qed.

Theorem what_was_taken_and_what_is_left_are_the_epoch : forall A base (order : list A), sound_base base order ->
  Permutation (taken_of base order ++ rest_of base order) order.
Proof.
  intros A. induction base as [|parts base IH]; intros order S; [reflexivity|]. destruct S as [S1 S2]. simpl. rewrite <- app_assoc, (IH _ S2).
  apply generation_splits, S1.
Qed.

Theorem the_shares_of_the_new_ranks_are_what_is_left : forall A world (rest : list A), 1 <= world ->
  Permutation (concat (map (fun r => pick rest (share_of world r (length rest))) (seq 0 world))) rest.
Proof.
  intros A world rest Wa. transitivity (pick rest (seq 0 (length rest))); [|rewrite pick_all; reflexivity].
  rewrite <- (pick_perm A rest _ _ (shares_are_all world (length rest) Wa)).
  induction (seq 0 world) as [|r l IH]; [constructor|]. simpl. rewrite pick_app. apply Permutation_app_head, IH.
Qed.
