(** The executable [align] of odb_ref/core/alignment.py, and what it keeps. Spec: R4. *)
Require Import List Arith Lia Permutation.
From ODB Require Import Types.
Import ListNotations.

(** ** The model *)

Section Sort.
  Variable A : Type.
  Variable before : A -> A -> bool.
  Fixpoint insert_by (x : A) (l : list A) : list A :=
    match l with
    | [] => [x]
    | y :: r => if before x y then x :: l else y :: insert_by x r
    end.
  (** Stable when [before x x]. *)
  Definition sort_by (l : list A) : list A := fold_right insert_by [] l.
End Sort.
Arguments insert_by {A}.
Arguments sort_by {A}.

Definition is_due (due_before : nat) (g : group) : bool := existsb (fun x => pos x <? due_before) g.

(** Due groups first, then the fullest. *)
Definition goes_first (due_before : nat) (g h : group) : bool :=
  match is_due due_before g, is_due due_before h with
  | true, false => true
  | false, true => false
  | _, _ => padded_first h <=? padded_first g
  end.

Definition by_position : list sample -> list sample := sort_by (fun x y => pos x <=? pos y).
Definition fullest_first : list group -> list group := sort_by (fun g h => padded_first h <=? padded_first g).

(** 0 when the group cannot be split; else it orders as the padded tokens do. *)
Definition splittable (g : group) : nat := if 1 <? length g then S (padded_first g) else 0.

Definition most_splittable (gs : list group) : nat := fold_right (fun g m => Nat.max (splittable g) m) 0 gs.

(** The first group that is splittable to the degree [m], and the others in order. *)
Fixpoint take_out (m : nat) (gs : list group) : option (group * list group) :=
  match gs with
  | [] => None
  | g :: r => if splittable g =? m then Some (g, r)
              else match take_out m r with Some (h, s) => Some (h, g :: s) | None => None end
  end.

Definition pick (gs : list group) : option (group * list group) :=
  if most_splittable gs =? 0 then None else take_out (most_splittable gs) gs.

Definition middle (g : group) : nat := Nat.div2 (S (length g)).

(** Halves the group with most padded tokens, [fuel] times or until only single samples are left. *)
Fixpoint split_groups (fuel : nat) (gs : list group) : list group :=
  match fuel with
  | 0 => gs
  | S f => match pick gs with
           | None => gs
           | Some (g, r) => split_groups f (r ++ [firstn (middle g) g; skipn (middle g) g])
           end
  end.

Definition align (gs : list group) (target due_before : nat) : list group * list sample :=
  if target <? length gs then
    let order := sort_by (goes_first due_before) gs in
    (fullest_first (firstn target order), by_position (concat (skipn target order)))
  else
    let parts := split_groups (target - length gs) gs in
    (fullest_first parts ++ repeat [] (target - length parts), []).

(** ** What it keeps *)

Lemma insert_by_perm : forall A (b : A -> A -> bool) x l, Permutation (insert_by b x l) (x :: l).
Proof.
  induction l as [|y l IH]; simpl; [auto|]. destruct (b x y); [auto|]. rewrite IH. apply perm_swap.
Qed.

Lemma sort_by_perm : forall A (b : A -> A -> bool) l, Permutation (sort_by b l) l.
Proof. induction l as [|x l IH]; simpl; [auto|]. rewrite insert_by_perm, IH. auto. Qed.

Lemma sort_by_length : forall A (b : A -> A -> bool) l, length (sort_by b l) = length l.
Proof. intros. apply Permutation_length, sort_by_perm. Qed.

Lemma Forall_perm : forall A (P : A -> Prop) l m, Permutation l m -> Forall P l -> Forall P m.
Proof. intros A P l m H F. rewrite Forall_forall in *. intros x Hx. apply F. eapply Permutation_in; [symmetry; exact H|exact Hx]. Qed.

Lemma sort_by_forall : forall A (b : A -> A -> bool) (P : A -> Prop) l, Forall P l -> Forall P (sort_by b l).
Proof. intros. eapply Forall_perm; [symmetry; apply sort_by_perm|assumption]. Qed.

Lemma Forall_firstn : forall A (P : A -> Prop) n l, Forall P l -> Forall P (firstn n l).
Proof. intros A P n l F. rewrite <- (firstn_skipn n l), Forall_app in F. apply F. Qed.

Lemma take_out_perm : forall m gs g r, take_out m gs = Some (g, r) -> Permutation gs (g :: r) /\ splittable g = m.
Proof.
  induction gs as [|h gs IH]; simpl; intros g r H; [discriminate|].
  destruct (splittable h =? m) eqn:E.
  - injection H as <- <-. apply Nat.eqb_eq in E. auto.
  - destruct (take_out m gs) as [[k s]|] eqn:T; [|discriminate]. injection H as <- <-.
    destruct (IH k s eq_refl) as [P E']. split; [|assumption]. rewrite P. apply perm_swap.
Qed.

Lemma take_out_some : forall gs, gs <> [] -> take_out (most_splittable gs) gs <> None.
Proof.
  assert (H : forall gs m, (exists g, In g gs /\ splittable g = m) -> take_out m gs <> None).
  { induction gs as [|h gs IH]; simpl; intros m [g [Hg E]]; [easy|]. destruct (splittable h =? m) eqn:E'; [discriminate|].
    destruct Hg as [->|Hg]; [apply Nat.eqb_neq in E'; lia|].
    specialize (IH m (ex_intro _ g (conj Hg E))). destruct (take_out m gs) as [[? ?]|]; [discriminate|easy]. }
  intros gs NE. apply H. clear H. induction gs as [|h gs IH]; [easy|]. simpl.
  destruct (Nat.max_dec (splittable h) (most_splittable gs)) as [E|E]; rewrite E; [eauto|].
  destruct gs as [|k gs].
  - simpl in E. exists h. simpl. split; auto. unfold most_splittable in *. simpl in *. lia.
  - destruct IH as [g [Hg Eg]]; [discriminate|]. exists g. split; [right; exact Hg|exact Eg].
Qed.

Lemma most_splittable_bound : forall gs g, In g gs -> splittable g <= most_splittable gs.
Proof.
  induction gs as [|h gs IH]; intros g H; [easy|].
  change (most_splittable (h :: gs)) with (Nat.max (splittable h) (most_splittable gs)).
  destruct H as [->|H]; [lia|]. specialize (IH g H). lia.
Qed.

Lemma pick_some : forall gs g r, pick gs = Some (g, r) -> Permutation gs (g :: r) /\ 2 <= length g.
Proof.
  unfold pick. intros gs g r H. destruct (most_splittable gs =? 0) eqn:E; [discriminate|].
  apply take_out_perm in H as [P S]. split; [exact P|]. apply Nat.eqb_neq in E. unfold splittable in S.
  destruct (1 <? length g) eqn:L; [apply Nat.ltb_lt in L; lia|lia].
Qed.

Lemma pick_none : forall gs, pick gs = None -> Forall (fun g => length g <= 1) gs.
Proof.
  unfold pick. intros gs H. destruct (most_splittable gs =? 0) eqn:E.
  - apply Nat.eqb_eq in E. rewrite Forall_forall. intros g Hg. apply most_splittable_bound in Hg. rewrite E in Hg.
    unfold splittable in Hg. destruct (1 <? length g) eqn:L; [inversion Hg|apply Nat.ltb_ge in L; exact L].
  - destruct gs as [|g gs]; [constructor|]. apply take_out_some in H; [easy|discriminate].
Qed.

Lemma middle_bounds : forall g : group, 2 <= length g -> 1 <= middle g < length g.
Proof.
  unfold middle. intros g H. pose proof (Nat.div2_odd (S (length g))) as O. destruct (Nat.odd (S (length g))); simpl Nat.b2n in O; lia.
Qed.

(** What a split keeps of any property that passes from a group to its two halves. *)
Lemma split_keeps : forall (P : group -> Prop),
  (forall g, 2 <= length g -> P g -> P (firstn (middle g) g) /\ P (skipn (middle g) g)) ->
  forall fuel gs, Forall P gs -> Forall P (split_groups fuel gs).
Proof.
  intros P H. induction fuel as [|f IH]; simpl; intros gs F; [assumption|].
  destruct (pick gs) as [[g r]|] eqn:E; [|assumption]. apply pick_some in E as [Pm L]. apply IH.
  apply (Forall_perm _ _ _ _ Pm) in F. inversion F; subst. destruct (H g L) as [H1' H2']; [assumption|].
  apply Forall_app. repeat constructor; assumption.
Qed.

Lemma split_perm : forall fuel gs, Permutation (concat (split_groups fuel gs)) (concat gs).
Proof.
  induction fuel as [|f IH]; simpl; intros gs; [auto|].
  destruct (pick gs) as [[g r]|] eqn:E; [|auto]. apply pick_some in E as [Pm _]. rewrite IH.
  rewrite (concat_perm _ _ _ Pm), concat_app. simpl. rewrite app_nil_r, firstn_skipn. apply Permutation_app_comm.
Qed.

Lemma split_length : forall fuel gs, length gs <= length (split_groups fuel gs) <= fuel + length gs.
Proof.
  induction fuel as [|f IH]; simpl; intros gs; [lia|].
  destruct (pick gs) as [[g r]|] eqn:E; [|lia]. apply pick_some in E as [Pm _].
  specialize (IH (r ++ [firstn (middle g) g; skipn (middle g) g])). apply Permutation_length in Pm.
  rewrite app_length in IH. simpl in *. lia.
Qed.

(** Fewer groups than asked for are left only when every group is a single sample. *)
Lemma split_done : forall fuel gs, length (split_groups fuel gs) = fuel + length gs \/
  Forall (fun g => length g <= 1) (split_groups fuel gs).
Proof.
  induction fuel as [|f IH]; simpl; intros gs; [auto|].
  destruct (pick gs) as [[g r]|] eqn:E; [|right; apply pick_none; assumption]. apply pick_some in E as [Pm _].
  destruct (IH (r ++ [firstn (middle g) g; skipn (middle g) g])) as [H|H]; [left|right; exact H].
  rewrite H, app_length. apply Permutation_length in Pm. simpl in *. lia.
Qed.

Theorem an_alignment_has_exactly_the_target_number_of_steps : forall gs target due,
  length (fst (align gs target due)) = target.
Proof.
  intros. unfold align. destruct (target <? length gs) eqn:E; simpl.
  - apply Nat.ltb_lt in E. unfold fullest_first. rewrite sort_by_length, firstn_length, sort_by_length. lia.
  - apply Nat.ltb_ge in E. rewrite app_length, repeat_length. unfold fullest_first. rewrite sort_by_length.
    pose proof (split_length (target - length gs) gs). lia.
Qed.

Lemma concat_repeat_nil : forall (A : Type) n, concat (repeat ([] : list A) n) = [].
Proof. induction n; simpl; auto. Qed.

Theorem an_alignment_emits_and_carries_exactly_its_groups : forall gs target due,
  Permutation (concat (fst (align gs target due)) ++ snd (align gs target due)) (concat gs).
Proof.
  intros. unfold align. destruct (target <? length gs) eqn:E; simpl.
  - set (order := sort_by (goes_first due) gs).
    apply Permutation_trans with (concat (firstn target order) ++ concat (skipn target order)).
    + apply Permutation_app; [apply concat_perm|]; apply sort_by_perm.
    + rewrite <- concat_app, firstn_skipn. apply concat_perm, sort_by_perm.
  - rewrite app_nil_r, concat_app, concat_repeat_nil, app_nil_r.
    eapply Permutation_trans; [apply concat_perm, sort_by_perm|]. apply split_perm.
Qed.

Theorem an_alignment_keeps_the_budget : forall budget gs target due,
  Forall (fits budget) gs -> Forall (fits budget) (fst (align gs target due)).
Proof.
  intros budget gs target due F. unfold align. destruct (target <? length gs); simpl.
  - apply sort_by_forall, Forall_firstn, sort_by_forall, F.
  - apply Forall_app. split.
    + apply sort_by_forall, split_keeps; [|exact F]. intros g L Fg. pose proof (middle_bounds g L). split; eapply fits_part; try exact Fg.
      * rewrite firstn_length. lia.
      * intros x Hx. rewrite <- (firstn_skipn (middle g) g). apply in_or_app. auto.
      * rewrite skipn_length. lia.
      * intros x Hx. rewrite <- (firstn_skipn (middle g) g). apply in_or_app. auto.
    + apply Forall_forall. intros g Hg. apply repeat_spec in Hg. subst. left. simpl. lia.
Qed.

Lemma concat_length_singles : forall gs : list group, Forall (fun g => length g <= 1) gs -> length (concat gs) <= length gs.
Proof.
  induction gs as [|g gs IH]; simpl; intros F; [lia|]. inversion F; subst. rewrite app_length. specialize (IH H2). lia.
Qed.

Theorem a_rank_idles_only_when_it_has_fewer_samples_than_steps : forall gs target due,
  Forall (fun g => g <> []) gs -> target <= length (concat gs) -> Forall (fun g => g <> []) (fst (align gs target due)).
Proof.
  intros gs target due F L. unfold align. destruct (target <? length gs) eqn:E; simpl.
  - apply sort_by_forall, Forall_firstn, sort_by_forall, F.
  - apply Nat.ltb_ge in E.
    assert (Eq : length (split_groups (target - length gs) gs) = target).
    { destruct (split_done (target - length gs) gs) as [H|H]; [lia|].
      apply concat_length_singles in H. rewrite (Permutation_length (split_perm _ _)) in H.
      pose proof (split_length (target - length gs) gs). lia. }
    rewrite Eq, Nat.sub_diag, app_nil_r. apply sort_by_forall, split_keeps; [|exact F].
    intros g Lg _. pose proof (middle_bounds g Lg). split; intros N; apply (f_equal (@length sample)) in N.
    + rewrite firstn_length in N. simpl in N. lia.
    + rewrite skipn_length in N. simpl in N. lia.
Qed.

(** ** AGE within one round *)

Lemma due_sorted : forall due gs, exists a b,
  sort_by (goes_first due) gs = a ++ b /\ Forall (fun g => is_due due g = true) a /\ Forall (fun g => is_due due g = false) b.
Proof.
  intros due gs. induction gs as [|g gs [a [b [E [Fa Fb]]]]]; simpl; [exists [], []; auto|]. rewrite E. clear E.
  destruct (is_due due g) eqn:D.
  - induction a as [|h a IH]; simpl.
    + exists [g], b. repeat split; auto. destruct b as [|k b]; [reflexivity|]. simpl. unfold goes_first. inversion Fb; subst.
      rewrite D, H1. reflexivity.
    + inversion Fa; subst. destruct (goes_first due g h).
      * exists (g :: h :: a), b. repeat split; auto.
      * destruct (IH H2) as [a' [b' [E' [Fa' Fb']]]]. exists (h :: a'), b'. rewrite E'. repeat split; auto.
  - induction a as [|h a IH]; simpl.
    + exists [], (insert_by (goes_first due) g b). repeat split; auto.
      eapply Forall_perm; [symmetry; apply insert_by_perm|]. constructor; assumption.
    + inversion Fa; subst. unfold goes_first at 1. rewrite D, H1.
      destruct (IH H2) as [a' [b' [E' [Fa' Fb']]]]. exists (h :: a'), b'. rewrite E'. repeat split; auto.
Qed.

Definition count_due (due : nat) (gs : list group) : nat := length (filter (is_due due) gs).

Lemma count_due_perm : forall due gs hs, Permutation gs hs -> count_due due gs = count_due due hs.
Proof. unfold count_due. induction 1; simpl; auto; [destruct (is_due due x); simpl; auto | destruct (is_due due x), (is_due due y); simpl; auto | lia]. Qed.

Lemma count_due_app : forall due gs hs, count_due due (gs ++ hs) = count_due due gs + count_due due hs.
Proof. intros. unfold count_due. rewrite filter_app, app_length. reflexivity. Qed.

Lemma count_due_all : forall due gs, Forall (fun g => is_due due g = true) gs -> count_due due gs = length gs.
Proof. unfold count_due. induction 1 as [|g gs H F IH]; simpl; [reflexivity|]. rewrite H. simpl. lia. Qed.

Lemma count_due_le : forall due gs, count_due due gs <= length gs.
Proof. unfold count_due. induction gs as [|g gs IH]; simpl; [lia|]. destruct (is_due due g); simpl; lia. Qed.

Lemma is_due_false : forall due g x, is_due due g = false -> In x g -> due <= pos x.
Proof.
  unfold is_due. intros due g x H Hx. destruct (Nat.ltb (pos x) due) eqn:E; [|apply Nat.ltb_ge in E; exact E].
  assert (existsb (fun y => pos y <? due) g = true) by (apply existsb_exists; eauto). congruence.
Qed.

Theorem nothing_due_is_carried_when_the_target_covers_the_due_groups : forall gs target due,
  count_due due gs <= target -> Forall (fun x => due <= pos x) (snd (align gs target due)).
Proof.
  intros gs target due L. unfold align. destruct (target <? length gs); simpl; [|constructor].
  apply sort_by_forall. destruct (due_sorted due gs) as [a [b [E [Fa Fb]]]]. rewrite E.
  assert (La : length a <= target).
  { rewrite <- (count_due_all _ _ Fa). eapply Nat.le_trans; [|exact L].
    rewrite <- (count_due_perm due _ _ (sort_by_perm _ (goes_first due) gs)), E, count_due_app. lia. }
  rewrite skipn_app, (skipn_all2 a) by assumption. simpl. apply Forall_forall. intros x Hx.
  apply in_concat in Hx as [g [Hg Hx]]. eapply is_due_false; [|exact Hx].
  rewrite Forall_forall in Fb. apply Fb. rewrite <- (firstn_skipn (target - length a) b). apply in_or_app. auto.
Qed.
