(** The executable [align] of odb_ref/core/batching/alignment.py and what it keeps. Spec: R4.

    How groups are measured and how they are lined up are parameters. The theorems hold for every layout and cost that meet [gauge_ok],
    and for any line; those about the line itself need [line_ok]. The measures that ship are in Layouts.v. The line "fullest first" is
    in this file, the sampler's order in Runs.v. *)
Require Import List Arith Lia Bool Permutation Sorted.
From ODB Require Import Lists Types.
Import ListNotations.

(** ** The model *)

Definition is_due (due_before : nat) (g : group) : bool := existsb (fun x => pos x <? due_before) g.

Definition by_position : list sample -> list sample := sort_by (fun x y => pos x <=? pos y).

(** How a layout and a cost measure a group: its tokens, the cost by which groups are chosen for splitting, and the number of samples in
    the first of its two parts. *)
Record gauge := mkGauge { tokens_of : group -> nat; cost_of : group -> nat; middle_of : group -> nat }.

(** What measures must meet: neither part is empty, an idle step costs nothing, and a part costs no more than the whole group. *)
Record gauge_ok (m : gauge) : Prop := {
  ok_middle : forall g, 2 <= length g -> 1 <= middle_of m g < length g;
  ok_idle : cost_of m [] = 0;
  ok_part : forall part rest g, Permutation (part ++ rest) g -> cost_of m part <= cost_of m g }.

(** Which of two groups is chosen first, and which leaves first. *)
Record line := mkLine { is_chosen_first : group -> group -> bool; leaves_first : group -> group -> bool }.

Record line_ok (l : line) : Prop := {
  ok_chosen : orders (is_chosen_first l);
  ok_leaves : orders (leaves_first l);
  ok_idle_last : forall g, leaves_first l g [] = true }.

(** The fullest groups are chosen, and the most costly leave first. *)
Definition fullest_first (m : gauge) : line :=
  mkLine (fun g h => tokens_of m h <=? tokens_of m g) (fun g h => cost_of m h <=? cost_of m g).

Section Align.
Variables (M : gauge) (way : line).
Notation middle := (middle_of M).

(** Due groups go first, and otherwise the line decides. *)
Definition goes_first (due_before : nat) (g h : group) : bool :=
  match is_due due_before g, is_due due_before h with
  | true, false => true
  | false, true => false
  | _, _ => is_chosen_first way g h
  end.

Definition line_up : list group -> list group := sort_by (leaves_first way).

(** 0 if the group cannot be split; otherwise it orders groups as their costs do. *)
Definition splittable (g : group) : nat := if 1 <? length g then S (cost_of M g) else 0.

(** A group with its number, which counts groups as they are made, in a binary heap like that of Python's heapq: the most splittable
    first, of equals the one made first. The heap's order decides only which of equal groups is split, and the order among equals.
    The proofs below do not depend on it. *)
Notation item := (nat * group)%type.

Definition key (x : item) : nat := splittable (snd x).

Definition less (x y : item) : bool := (key y <? key x) || ((key x =? key y) && (fst x <? fst y)).

Fixpoint set_nth {A} (i : nat) (x : A) (l : list A) : list A :=
  match l, i with
  | [], _ => []
  | _ :: r, 0 => x :: r
  | y :: r, S j => y :: set_nth j x r
  end.

Definition swap {A} (i j : nat) (l : list A) : list A :=
  if i <? j then match nth_error l i, nth_error l j with Some a, Some b => set_nth i b (set_nth j a l) | _, _ => l end else l.

Definition less_at (l : list item) (i j : nat) : bool :=
  match nth_error l i, nth_error l j with Some a, Some b => less a b | _, _ => false end.

(** heapq._siftdown: the item at [p] rises, not above [top]. *)
Fixpoint rise (fuel top p : nat) (l : list item) : list item :=
  match fuel with
  | 0 => l
  | S f => let q := Nat.div2 (p - 1) in
           if (top <? p) && less_at l p q then rise f top q (swap q p l) else l
  end.

(** heapq._siftup: the item at [p] sinks to a leaf along the smaller children, then rises again. *)
Fixpoint sink (fuel top p : nat) (l : list item) : list item :=
  match fuel with
  | 0 => l
  | S f => let c := 2 * p + 1 in
           if c <? length l then
             let d := if (S c <? length l) && negb (less_at l c (S c)) then S c else c in
             sink f top d (swap p d l)
           else rise (length l) top p l
  end.

Definition push (x : item) (l : list item) : list item := rise (S (length l)) 0 (length l) (l ++ [x]).

(** The heap without its first item. *)
Definition pop (l : list item) : list item :=
  match l with
  | [] => []
  | _ :: r => match r with [] => [] | _ => sink (S (length r)) 0 0 (last r (0, []) :: removelast r) end
  end.

Definition heapify (l : list item) : list item :=
  fold_left (fun h i => sink (S (length h)) i i h) (rev (seq 0 (Nat.div2 (length l)))) l.

Definition most_splittable (l : list item) : nat := fold_right (fun x most => Nat.max (key x) most) 0 l.

(** The first item whose key is [most], and the others in order. *)
Fixpoint take_out (most : nat) (l : list item) : option (item * list item) :=
  match l with
  | [] => None
  | x :: r => if key x =? most then Some (x, r)
              else match take_out most r with Some (y, s) => Some (y, x :: s) | None => None end
  end.

(** The heap's first item is the most splittable one. If it were not, the list would be searched. *)
Definition pick (l : list item) : option (item * list item) :=
  let most := most_splittable l in
  if most =? 0 then None
  else match l with
       | x :: _ => if key x =? most then Some (x, pop l) else take_out most l
       | [] => None
       end.

(** Halves the most costly group, [fuel] times or until only single samples are left. *)
Fixpoint split_heap (fuel next : nat) (l : list item) : list item :=
  match fuel with
  | 0 => l
  | S f => match pick l with
           | None => l
           | Some ((_, g), r) => split_heap f (S (S next)) (push (S next, skipn (middle g) g) (push (next, firstn (middle g) g) r))
           end
  end.

Definition split_groups (fuel : nat) (gs : list group) : list group :=
  map snd (split_heap fuel (length gs) (heapify (combine (seq 0 (length gs)) gs))).

Definition align (gs : list group) (target due_before : nat) : list group * list sample :=
  if target <? length gs then
    let order := sort_by (goes_first due_before) gs in
    (line_up (firstn target order), by_position (concat (skipn target order)))
  else
    let parts := split_groups (target - length gs) gs in
    (line_up parts ++ repeat [] (target - length parts), []).

(** ** What an alignment keeps *)

Hypothesis ok : gauge_ok M.

Lemma set_nth_perm : forall (A : Type) i (x y : A) l, nth_error l i = Some y -> Permutation (y :: set_nth i x l) (x :: l).
Proof.
  induction i as [|i IH]; intros x y [|z l]; simpl; try discriminate; intros E.
  - injection E as ->. apply perm_swap.
  - rewrite perm_swap, (IH x y l E). apply perm_swap.
Qed.

Lemma set_nth_other : forall (A : Type) i j (x : A) l, i <> j -> nth_error (set_nth i x l) j = nth_error l j.
Proof. induction i as [|i IH]; intros [|j] x [|y l] Nh; simpl; try reflexivity; try lia. apply IH. lia. Qed.

Lemma swap_perm : forall (A : Type) i j (l : list A), Permutation (swap i j l) l.
Proof.
  intros A i j l. unfold swap. destruct (i <? j) eqn:L; [|reflexivity]. apply Nat.ltb_lt in L.
  destruct (nth_error l i) as [a|] eqn:Ea; [|reflexivity]. destruct (nth_error l j) as [b|] eqn:Eb; [|reflexivity].
  apply (Permutation_cons_inv (a := a)). rewrite (set_nth_perm A i b a) by (rewrite set_nth_other by lia; exact Ea). apply set_nth_perm, Eb.
Qed.

Lemma rise_perm : forall fuel top p l, Permutation (rise fuel top p l) l.
Proof. induction fuel as [|f IH]; intros; simpl; [reflexivity|]. destruct (_ && _); [|reflexivity]. rewrite IH. apply swap_perm. Qed.

Lemma sink_perm : forall fuel top p l, Permutation (sink fuel top p l) l.
Proof.
  induction fuel as [|f IH]; intros top p l; [reflexivity|]. cbn [sink]. destruct (_ <? _); [|apply rise_perm]. rewrite IH. apply swap_perm.
Qed.

Lemma push_perm : forall x l, Permutation (push x l) (x :: l).
Proof. intros. unfold push. rewrite rise_perm. symmetry. apply Permutation_cons_append. Qed.

Lemma pop_perm : forall x r, Permutation (pop (x :: r)) r.
Proof.
  intros x r. unfold pop. destruct r as [|y r]; [reflexivity|]. rewrite sink_perm.
  rewrite (app_removelast_last (0, []) (l := y :: r)) at 3 by discriminate. apply Permutation_cons_append.
Qed.

Lemma heapify_perm : forall l, Permutation (heapify l) l.
Proof.
  intros l. unfold heapify. generalize (rev (seq 0 (Nat.div2 (length l)))) as is_. intros is_. revert l.
  induction is_ as [|i is_ IH]; intros l; simpl; [reflexivity|]. rewrite IH. apply (sink_perm (S (length l)) i i l).
Qed.

Lemma take_out_perm : forall most l x r, take_out most l = Some (x, r) -> Permutation l (x :: r) /\ key x = most.
Proof.
  induction l as [|h l IH]; simpl; intros x r H; [discriminate|].
  destruct (key h =? most) eqn:E.
  - injection H as <- <-. apply Nat.eqb_eq in E. auto.
  - destruct (take_out most l) as [[k s]|] eqn:T; [|discriminate]. injection H as <- <-.
    destruct (IH k s eq_refl) as [P E']. split; [|assumption]. rewrite P. apply perm_swap.
Qed.

Lemma take_out_some : forall l, l <> [] -> take_out (most_splittable l) l <> None.
Proof.
  assert (H : forall l most, (exists g, In g l /\ key g = most) -> take_out most l <> None).
  { induction l as [|h l IH]; simpl; intros most [g [Hg E]]; [easy|]. destruct (key h =? most) eqn:E'; [discriminate|].
    destruct Hg as [->|Hg]; [apply Nat.eqb_neq in E'; lia|].
    specialize (IH most (ex_intro _ g (conj Hg E))). destruct (take_out most l) as [[? ?]|]; [discriminate|easy]. }
  intros l NE. apply H. clear H. induction l as [|h l IH]; [easy|]. change (most_splittable (h :: l)) with (Nat.max (key h) (most_splittable l)).
  destruct (Nat.max_dec (key h) (most_splittable l)) as [E|E]; rewrite E; [exists h; simpl; auto|].
  destruct l as [|k l].
  - exists h. split; [left; reflexivity|]. simpl in E |- *. lia.
  - destruct IH as [g [Hg Eg]]; [discriminate|]. exists g. split; [right; exact Hg|exact Eg].
Qed.

Lemma most_splittable_bound : forall l x, In x l -> key x <= most_splittable l.
Proof.
  induction l as [|h l IH]; intros x H; [easy|].
  change (most_splittable (h :: l)) with (Nat.max (key h) (most_splittable l)).
  destruct H as [->|H]; [lia|]. specialize (IH x H). lia.
Qed.

Lemma key_long : forall x, key x <> 0 -> 2 <= length (snd x).
Proof. unfold key, splittable. intros x H. destruct (1 <? length (snd x)) eqn:L; [apply Nat.ltb_lt in L; lia|lia]. Qed.

Lemma pick_some : forall l x r, pick l = Some (x, r) -> Permutation l (x :: r) /\ 2 <= length (snd x).
Proof.
  unfold pick. intros l x r H. destruct (most_splittable l =? 0) eqn:E; [discriminate|]. apply Nat.eqb_neq in E.
  destruct l as [|y l]; [discriminate|]. destruct (key y =? most_splittable (y :: l)) eqn:K.
  - injection H as <- <-. apply Nat.eqb_eq in K. split; [|apply key_long; lia]. apply perm_skip. symmetry. apply (pop_perm y l).
  - apply take_out_perm in H as [P K']. split; [exact P|apply key_long; lia].
Qed.

Lemma pick_none : forall l, pick l = None -> Forall (fun x => length (snd x) <= 1) l.
Proof.
  unfold pick. intros l H. destruct (most_splittable l =? 0) eqn:E.
  - apply Nat.eqb_eq in E. rewrite Forall_forall. intros x Hx. apply most_splittable_bound in Hx. rewrite E in Hx.
    unfold key, splittable in Hx. destruct (1 <? length (snd x)) eqn:L; [inversion Hx|apply Nat.ltb_ge in L; exact L].
  - destruct l as [|y l]; [constructor|]. destruct (key y =? _); [discriminate|]. exfalso. apply (take_out_some (y :: l)); [discriminate|exact H].
Qed.

Lemma halves_perm : forall i j g r, Permutation (map snd (push (j, skipn (middle g) g) (push (i, firstn (middle g) g) r))) (firstn (middle g) g :: skipn (middle g) g :: map snd r).
Proof. intros. rewrite (Permutation_map snd (push_perm _ _)). simpl. rewrite (Permutation_map snd (push_perm _ _)). simpl. apply perm_swap. Qed.

Lemma start_heap : forall gs : list group, Permutation (map snd (heapify (combine (seq 0 (length gs)) gs))) gs.
Proof.
  intros gs. rewrite (Permutation_map snd (heapify_perm _)). apply Permutation_refl'. generalize 0 as k.
  induction gs as [|g gs IH]; intros k; simpl; [reflexivity|]. rewrite IH. reflexivity.
Qed.

(** Splitting keeps what holds of groups in any order, and of the two halves in place of a group. *)
Lemma splitting_keeps : forall (J : list group -> Prop), (forall gs hs, Permutation gs hs -> J gs -> J hs) ->
  (forall g r, 2 <= length g -> J (g :: r) -> J (firstn (middle g) g :: skipn (middle g) g :: r)) ->
  forall fuel gs, J gs -> J (split_groups fuel gs).
Proof.
  intros J Pe H. assert (X : forall fuel next l, J (map snd l) -> J (map snd (split_heap fuel next l))).
  { induction fuel as [|f IH]; simpl; intros next l F; [exact F|]. destruct (pick l) as [[[o g] r]|] eqn:E; [|exact F]. apply pick_some in E as [Pm L].
    apply IH, (Pe _ _ (Permutation_sym (halves_perm _ _ _ _))), H; [exact L|]. exact (Pe _ _ (Permutation_map snd Pm) F). }
  intros fuel gs F. apply X, (Pe _ _ (Permutation_sym (start_heap gs)) F).
Qed.

Lemma split_keeps : forall (P : group -> Prop),
  (forall g, 2 <= length g -> P g -> P (firstn (middle g) g) /\ P (skipn (middle g) g)) ->
  forall fuel gs, Forall P gs -> Forall P (split_groups fuel gs).
Proof.
  intros P H. apply splitting_keeps; [intros gs hs; apply Forall_perm|]. intros g r L F. inversion F; subst. destruct (H g L) as [A B]; auto.
Qed.

Lemma split_perm : forall fuel gs, Permutation (concat (split_groups fuel gs)) (concat gs).
Proof.
  intros fuel gs. apply (splitting_keeps (fun hs => Permutation (concat hs) (concat gs))); [intros hs ks P <-; symmetry; apply concat_perm, P| |reflexivity].
  intros g r _ <-. simpl. rewrite app_assoc, firstn_skipn. reflexivity.
Qed.

(** There are fewer groups than asked for only if every group is a single sample. *)
Lemma split_done : forall fuel gs, length gs <= length (split_groups fuel gs) <= fuel + length gs /\
  (length (split_groups fuel gs) = fuel + length gs \/ Forall (fun g => length g <= 1) (split_groups fuel gs)).
Proof.
  assert (X : forall fuel next l, let new := split_heap fuel next l in
    length l <= length new <= fuel + length l /\ (length new = fuel + length l \/ Forall (fun g => length g <= 1) (map snd new))).
  { induction fuel as [|f IH]; simpl; intros next l; [auto with arith|].
    destruct (pick l) as [[[o g] r]|] eqn:E; [|split; [lia|right; apply Forall_map, pick_none, E]]. apply pick_some in E as [Pm _]. apply Permutation_length in Pm.
    specialize (IH (S (S next)) (push (S next, skipn (middle g) g) (push (next, firstn (middle g) g) r))).
    rewrite (Permutation_length (push_perm _ _)) in IH. simpl in Pm, IH. rewrite (Permutation_length (push_perm _ _)) in IH. simpl in IH.
    destruct IH as [B [D|D]]; (split; [lia|]); [left; lia|right; exact D]. }
  intros fuel gs. specialize (X fuel (length gs) (heapify (combine (seq 0 (length gs)) gs))). pose proof (Permutation_length (start_heap gs)) as L. rewrite map_length in L.
  cbv zeta in X. rewrite L in X. unfold split_groups. rewrite map_length. exact X.
Qed.

Theorem an_alignment_has_exactly_the_target_number_of_steps : forall gs target due,
  length (fst (align gs target due)) = target.
Proof.
  intros. unfold align. destruct (target <? length gs) eqn:E; simpl.
  - apply Nat.ltb_lt in E. unfold line_up. rewrite sort_by_length, firstn_length, sort_by_length. lia.
  - apply Nat.ltb_ge in E. rewrite app_length, repeat_length. unfold line_up. rewrite sort_by_length.
    pose proof (proj1 (split_done (target - length gs) gs)). lia.
Qed.

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

(** [P] passes from a group to each part of it. *)
Definition passes_on (P : group -> Prop) : Prop := forall part rest g, Permutation (part ++ rest) g -> P g -> P part.

Theorem an_alignment_keeps_what_passes_to_parts : forall (P : group -> Prop) gs target due, P [] -> passes_on P ->
  Forall P gs -> Forall P (fst (align gs target due)).
Proof.
  intros P gs target due E H F. unfold align. destruct (target <? length gs); simpl.
  - apply sort_by_forall, Forall_firstn, sort_by_forall, F.
  - apply Forall_app. split.
    + apply sort_by_forall, split_keeps; [|exact F]. intros g _ Fg. split; eapply H; try exact Fg.
      * rewrite firstn_skipn. reflexivity.
      * rewrite Permutation_app_comm, firstn_skipn. reflexivity.
    + apply Forall_repeat, E.
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
    { destruct (split_done (target - length gs) gs) as [B [H|H]]; [lia|]. apply concat_length_singles in H. rewrite (Permutation_length (split_perm _ _)) in H. lia. }
    rewrite Eq, Nat.sub_diag, app_nil_r. apply sort_by_forall, split_keeps; [|exact F].
    intros g Lg _. pose proof (ok_middle M ok g Lg). split; intros Na; apply (f_equal (@length sample)) in Na.
    + rewrite firstn_length in Na. simpl in Na. lia.
    + rewrite skipn_length in Na. simpl in Na. lia.
Qed.

Theorem an_alignment_carries_only_surplus_groups : forall gs target due, length gs <= target -> snd (align gs target due) = [].
Proof. intros gs target due Lt. unfold align. replace (target <? length gs) with false by (symmetry; apply Nat.ltb_ge; exact Lt). reflexivity. Qed.

(** ** ORDER: what is lined up, split and carried *)

Theorem the_steps_of_an_alignment_are_lined_up : forall gs target due, line_ok way ->
  StronglySorted (fun g h => leaves_first way g h = true) (fst (align gs target due)).
Proof.
  intros gs target due [_ Ok Idle]. unfold align. destruct (target <? length gs); simpl; [apply sort_by_sorted, Ok|].
  assert (I : forall n, StronglySorted (fun g h => leaves_first way g h = true) (repeat [] n)).
  { induction n as [|n IH]; simpl; constructor; [exact IH|apply Forall_repeat, Idle]. }
  assert (S : StronglySorted (fun g h => leaves_first way g h = true) (line_up (split_groups (target - length gs) gs)))
    by apply sort_by_sorted, Ok.
  revert S. generalize (line_up (split_groups (target - length gs) gs)) as l. induction l as [|g l IH]; simpl; intros S; [apply I|].
  inversion S as [|? ? S1 S2]; subst. constructor; [apply IH, S1|]. apply Forall_app. split; [exact S2|apply Forall_repeat, Idle].
Qed.

Theorem no_step_of_an_alignment_costs_more_than_the_most_costly_group : forall most gs target due,
  Forall (fun g => cost_of M g <= most) gs -> Forall (fun g => cost_of M g <= most) (fst (align gs target due)).
Proof.
  intros most gs target due. apply an_alignment_keeps_what_passes_to_parts; [rewrite (ok_idle M ok); lia|].
  intros part rest g P L. pose proof (ok_part M ok part rest g P). lia.
Qed.

Lemma goes_first_orders : forall due, line_ok way -> orders (goes_first due).
Proof.
  intros due [[To Al] _ _]. split; unfold goes_first.
  - intros g h. destruct (is_due due g), (is_due due h); intros E; try discriminate; try reflexivity; apply To, E.
  - intros g h k. destruct (is_due due g), (is_due due h), (is_due due k); intros E F; try discriminate; try reflexivity; eapply Al; eassumption.
Qed.

(** The groups that come last are carried. Due groups leave before others; among equally due groups, those chosen first leave. *)
Theorem what_leaves_goes_before_what_is_carried : forall gs target due, line_ok way -> target <= length gs -> exists leaving staying,
  Permutation gs (leaving ++ staying) /\ Permutation (concat (fst (align gs target due))) (concat leaving) /\
  Permutation (snd (align gs target due)) (concat staying) /\
  forall g h, In g leaving -> In h staying -> goes_first due g h = true.
Proof.
  intros gs target due Ok Lt. exists (firstn target (sort_by (goes_first due) gs)), (skipn target (sort_by (goes_first due) gs)).
  split; [rewrite firstn_skipn; symmetry; apply sort_by_perm|].
  assert (O : Permutation (concat (fst (align gs target due))) (concat (firstn target (sort_by (goes_first due) gs))) /\
              Permutation (snd (align gs target due)) (concat (skipn target (sort_by (goes_first due) gs)))).
  { pose proof (an_alignment_emits_and_carries_exactly_its_groups gs target due) as P. unfold align in *.
    destruct (target <? length gs) eqn:E; simpl in *; [split; [apply concat_perm|]; apply sort_by_perm|].
    apply Nat.ltb_ge in E. rewrite firstn_all2, skipn_all2 by (rewrite sort_by_length; lia). split; [|reflexivity].
    rewrite app_nil_r in P. rewrite P. apply concat_perm. symmetry. apply sort_by_perm. }
  destruct O as [O1 O2]. split; [exact O1|]. split; [exact O2|]. pose proof (sort_by_sorted _ _ gs (goes_first_orders due Ok)) as S.
  rewrite <- (firstn_skipn target (sort_by _ gs)) in S. apply sorted_app in S. apply S.
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
  { unfold count_due in L. rewrite <- (Permutation_length (Permutation_filter _ (is_due due) _ _ (sort_by_perm _ (goes_first due) gs))), E, filter_app, app_length in L.
    rewrite (filter_all _ _ true a) in L by (apply Forall_forall, Fa). lia. }
  rewrite skipn_app, (skipn_all2 a) by assumption. simpl. apply Forall_forall. intros x Hx.
  apply in_concat in Hx as [g [Hg Hx]]. eapply is_due_false; [|exact Hx].
  rewrite Forall_forall in Fb. apply Fb. rewrite <- (firstn_skipn (target - length a) b). apply in_or_app. auto.
Qed.

End Align.

(** ** Fullest first *)

Theorem the_steps_of_an_alignment_are_lined_up_by_falling_cost : forall M gs target due, gauge_ok M ->
  StronglySorted (fun g h => cost_of M h <= cost_of M g) (fst (align M (fullest_first M) gs target due)).
Proof.
  intros M gs target due ok. assert (L : line_ok (fullest_first M))
    by (split; simpl; try orders_numbers; intros g; rewrite (ok_idle M ok); reflexivity).
  pose proof (the_steps_of_an_alignment_are_lined_up M _ gs target due L) as S.
  eapply sorted_weaker; [|exact S]. intros g h. apply Nat.leb_le.
Qed.
