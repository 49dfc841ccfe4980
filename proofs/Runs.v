(** The order sampler: the executable [compute_runs] of odb_ref/core/batching/grouping.py, and the line of its groups from order.py. A
    group is a run of the window, and groups leave in the sampler's order. Laid end to end, what leaves and what is carried are the
    window by position. Spec: R2.6, R4.1. *)
Require Import List Arith Lia Bool Permutation Sorted.
From ODB Require Import Lists Types Alignment Order Layouts.
Import ListNotations.

(** ** The model *)

Section Runs.
Variables (tokens : group -> nat) (budget : nat) (limits : list nat).

Definition is_fitting (g : group) : bool := (tokens g <=? budget) && is_within limits g.

(** Each sample joins the current run if it fits, or begins the next run. *)
Definition compute_runs (window : list sample) : list group := greedy (fun run x => is_fitting (run ++ [x])) [] (by_position window).

End Runs.

(** By the position of the first sample; idle steps last. *)
Definition stands_first (g h : group) : bool :=
  match g, h with
  | _, [] => true
  | [], _ => false
  | x :: _, y :: _ => pos x <=? pos y
  end.

Definition by_place : line := mkLine stands_first stands_first.

(** The orders that ship: the sampler's order, and an order by places, which rearranges groups that are chosen fullest first. To compare
    the places themselves gives the order "fullest first". *)
Inductive order := Sampler | ByPlaces (before : nat -> nat -> nat -> bool).

(** The most padding that a group may hold under the budget [b]: a share of [b] (R16.3), or all of it in sampler order. *)
Definition most_padding (o : order) (padding_share b : nat) : nat := match o with Sampler => b | ByPlaces _ => Nat.div b padding_share end.

Definition form_in (o : order) (l : layout) (padding_share b : nat) : list nat -> list sample -> list group :=
  match o with Sampler => compute_runs (tokens_of (gauge_of l tokens_cost)) b | ByPlaces _ => form l b (most_padding o padding_share b) end.

Definition align_in (o : order) (M : gauge) : nat -> list group -> nat -> nat -> list group * list sample :=
  match o with Sampler => fun _ => align M by_place | ByPlaces before => shuffle M (fullest_first M) before end.

(** ** What runs keep *)

Theorem runs_laid_end_to_end_are_the_window_by_position : forall t b limits w, concat (compute_runs t b limits w) = by_position w.
Proof. intros. apply greedy_concat. Qed.

Theorem no_run_is_empty : forall t b limits w, Forall (fun g => g <> []) (compute_runs t b limits w).
Proof. intros. apply no_run_is_left_empty. Qed.

Theorem every_run_fits_the_budget : forall t b limits w,
  Forall (fun g => length g <= 1 \/ is_fitting t b limits g = true) (compute_runs t b limits w).
Proof.
  intros t b limits w. apply (greedy_keeps _ _ _ (by_position w)) with (before := []); auto.
Qed.

Theorem no_partition_into_runs_under_the_budget_has_fewer_groups : forall l padding_share b most limits w Q,
  concat Q = by_position w -> Forall (fits_in l b most limits) Q -> length (form_in Sampler l padding_share b limits w) <= length Q.
Proof.
  intros l padding_share b most limits w Q E F. apply (no_good_runs_are_fewer _ _ (fits_in l b most limits)); [| |exact F|exact E].
  - intros g h k. apply (fits_in_passes_on l b most limits h (g ++ k)). rewrite !app_assoc. apply Permutation_app_tail, Permutation_app_comm.
  - intros run x Nh [S|[S [_ Wa]]]; [rewrite app_length in S; destruct run; [easy|simpl in S; lia]|].
    unfold is_fitting. rewrite Wa, andb_true_r. apply Nat.leb_le. destruct l; exact S.
Qed.

(** ** The order of positions *)

Definition rising (l : list sample) : Prop := StronglySorted (fun x y => pos x < pos y) l.

(** A strictly sorted list is the only result of sorting its permutations. *)
Lemma sorted_once : forall A (before : A -> A -> bool) l m, orders before ->
  StronglySorted (fun a b => before b a = false) l -> Permutation m l -> sort_by before m = l.
Proof.
  intros A before l m Or S P. pose proof (sort_by_sorted A before m Or) as T. assert (Q : Permutation (sort_by before m) l) by (rewrite sort_by_perm; exact P).
  clear P. revert T Q. generalize (sort_by before m) as k. clear m. induction S as [|x l S IH F]; intros k T Q.
  - apply Permutation_sym, Permutation_nil in Q. exact Q.
  - destruct k as [|y k]; [apply Permutation_nil in Q; discriminate|]. inversion T as [|? ? T1 T2]; subst.
    assert (E : y = x).
    { assert (Iy : In y (x :: l)) by (eapply Permutation_in; [exact Q|left; reflexivity]).
      assert (Ix : In x (y :: k)) by (eapply Permutation_in; [symmetry; exact Q|left; reflexivity]).
      destruct Iy as [Iy|Iy]; [auto|]. destruct Ix as [Ix|Ix]; [auto|]. rewrite Forall_forall in F, T2.
      specialize (F y Iy). specialize (T2 x Ix). simpl in *. congruence. }
    subst y. f_equal. apply IH; [exact T1|]. eapply Permutation_cons_inv, Q.
Qed.

Lemma by_position_once : forall l m, rising l -> Permutation m l -> by_position m = l.
Proof.
  intros l m A P. apply sorted_once; [orders_numbers| |exact P]. eapply sorted_weaker; [|exact A]. intros x y. apply Nat.leb_gt.
Qed.

Lemma by_place_is_a_line : line_ok by_place.
Proof.
  assert (O : orders stands_first).
  { split; [intros [|x g] [|y h]; simpl; intros E; try discriminate; try reflexivity; apply Nat.leb_gt in E; apply Nat.leb_le; lia|].
    intros [|x g] [|y h] [|z k]; simpl; intros E F; try discriminate; try reflexivity. apply Nat.leb_le in E, F. apply Nat.leb_le. lia. }
  split; [exact O|exact O|]. intros [|x g]; reflexivity.
Qed.

(** Runs that are neighbours are in the order of their positions. *)
Lemma runs_stand : forall gs, Forall (fun g => g <> []) gs -> rising (concat gs) ->
  StronglySorted (fun g h => forall x y, In x g -> In y h -> pos x < pos y) gs.
Proof.
  induction gs as [|g gs IH]; simpl; intros F A; [constructor|]. inversion F as [|? ? F1 F2]; subst. apply sorted_app in A as [_ [A B]].
  constructor; [apply IH; assumption|]. apply Forall_forall. intros h Hh x y Hx Hy. apply B; [exact Hx|]. apply in_concat. eauto.
Qed.

Lemma lined_up_once : forall ps gs, Forall (fun g => g <> []) gs -> rising (concat gs) -> Permutation ps gs -> line_up by_place ps = gs.
Proof.
  intros ps gs F A P. apply sorted_once; [apply by_place_is_a_line| |exact P]. pose proof (runs_stand gs F A) as S. clear A P.
  induction S as [|g gs S IH H]; constructor; inversion F as [|? ? F1 F2]; subst; [apply IH, F2|].
  rewrite Forall_forall in *. intros h Hh. specialize (F2 h Hh). specialize (H h Hh).
  destruct g as [|x g]; [easy|]. destruct h as [|y h]; [easy|]. simpl. apply Nat.leb_gt, H; left; reflexivity.
Qed.

(** ** Alignment *)

Section Align.
Variable M : gauge.
Hypothesis ok : gauge_ok M.

(** Splitting yields neighbouring runs, in some order. *)
Lemma split_runs : forall fuel gs, Forall (fun g => g <> []) gs -> exists ps,
  Permutation (split_groups M fuel gs) ps /\ Forall (fun g => g <> []) ps /\ concat ps = concat gs.
Proof.
  intros fuel gs F. apply (splitting_keeps M (fun hs => exists ps, Permutation hs ps /\ Forall (fun g => g <> []) ps /\ concat ps = concat gs)); [|intros g r Lg|eauto].
  - intros hs ks P [ps [Q X]]. exists ps. split; [rewrite <- P; exact Q|exact X].
  - intros [ps [P [Ne <-]]]. assert (Ig : In g ps) by (eapply Permutation_in; [exact P|left; reflexivity]). destruct (in_split _ _ Ig) as [a [b ->]].
    set (h1 := firstn (middle_of M g) g). set (h2 := skipn (middle_of M g) g). exists (a ++ h1 :: h2 :: b). split; [|split].
    + apply Permutation_cons_app_inv in P. rewrite P, <- !Permutation_middle. reflexivity.
    + apply Forall_app in Ne as [F1 F2]. inversion F2; subst. pose proof (ok_middle M ok g Lg) as Mg.
      apply Forall_app. split; [assumption|]. constructor; [|constructor; [|assumption]]; intros Z; apply (f_equal (@length sample)) in Z; unfold h1, h2 in Z;
        rewrite ?firstn_length, ?skipn_length in Z; simpl in Z; lia.
    + rewrite !concat_app. simpl. rewrite app_assoc with (l := h1). unfold h1, h2. rewrite firstn_skipn. reflexivity.
Qed.

(** ORDER: the samples of the steps in turn, followed by those carried, are in their order. *)
Theorem an_alignment_by_place_leaves_samples_in_their_order : forall gs target due,
  Forall (fun g => g <> []) gs -> rising (concat gs) ->
  concat (fst (align M by_place gs target due)) ++ snd (align M by_place gs target due) = concat gs.
Proof.
  intros gs target due F A. unfold align. destruct (target <? length gs); simpl.
  - assert (E : sort_by (goes_first by_place due) gs = gs).
    { apply sorted_once; [apply goes_first_orders, by_place_is_a_line| |reflexivity]. pose proof (runs_stand gs F A) as S. clear A.
      induction S as [|g gs S IH H]; constructor; inversion F as [|? ? F1 F2]; subst; [apply IH, F2|].
      rewrite Forall_forall in *. intros h Hh. specialize (F2 h Hh). specialize (H h Hh). destruct g as [|x g]; [easy|]. destruct h as [|y h]; [easy|].
      assert (B : pos x < pos y) by (apply H; left; reflexivity). unfold goes_first.
      destruct (is_due due (x :: g)) eqn:Dg, (is_due due (y :: h)) eqn:Dh; try reflexivity; try (simpl; apply Nat.leb_gt; lia).
      exfalso. unfold is_due in Dg, Dh. apply existsb_exists in Dh as [z [Iz Lz]]. apply Nat.ltb_lt in Lz.
      assert (Lx : pos x < due) by (specialize (H x z (or_introl eq_refl) Iz); lia). simpl in Dg. apply orb_false_iff in Dg as [Dg _].
      apply Nat.ltb_ge in Dg. lia. }
    rewrite E. rewrite <- (firstn_skipn target gs) in A. rewrite concat_app in A. apply sorted_app in A as [A1 [A2 _]].
    rewrite (lined_up_once _ (firstn target gs)); [|apply Forall_firstn, F|exact A1|reflexivity].
    rewrite (by_position_once (concat (skipn target gs))) by (assumption || reflexivity).
    rewrite <- concat_app, firstn_skipn. reflexivity.
  - destruct (split_runs (target - length gs) gs F) as [ps [P [Fp E]]]. rewrite app_nil_r, concat_app, concat_repeat_nil, app_nil_r.
    rewrite (lined_up_once _ ps Fp); [exact E|rewrite E; exact A|exact P].
Qed.

End Align.

(** ** In every order that ships *)

Theorem in_every_order_every_group_fits_the_budget : forall o l padding_share b limits w,
  Forall (fits_in l b (most_padding o padding_share b) limits) (form_in o l padding_share b limits w).
Proof.
  intros [|before] l padding_share b limits w; [|apply in_either_layout_every_group_fits_the_budget]. simpl.
  eapply Forall_impl; [|apply every_run_fits_the_budget]. intros g [S|S]; [left; exact S|right].
  apply andb_true_iff in S as [S Wa]. apply Nat.leb_le in S. split; [|split; [simpl|exact Wa]]; destruct l; simpl in *; lia.
Qed.

Theorem in_every_order_groups_hold_exactly_the_window : forall o l padding_share b limits w,
  Permutation (concat (form_in o l padding_share b limits w)) w /\ Forall (fun g => g <> []) (form_in o l padding_share b limits w).
Proof.
  intros [|before] l padding_share b limits w; [|apply in_either_layout_groups_hold_exactly_the_window]. split; [|apply no_run_is_empty].
  simpl. rewrite runs_laid_end_to_end_are_the_window_by_position. apply sort_by_perm.
Qed.

Theorem in_every_order_an_alignment_keeps_the_budget : forall o l C k b most limits gs t d, cost_ok C -> Forall (fits_in l b most limits) gs ->
  Forall (fits_in l b most limits) (fst (align_in o (gauge_of l C) k gs t d)).
Proof. intros [|before] l C k b most limits gs t d Co F; [apply an_alignment_keeps_the_budget|apply shuffling_keeps_the_budget]; assumption. Qed.

Theorem in_every_order_an_alignment_has_the_target_number_of_steps : forall o M k gs t d, length (fst (align_in o M k gs t d)) = t.
Proof.
  intros [|before] M k gs t d; [apply an_alignment_has_exactly_the_target_number_of_steps|apply shuffling_keeps_the_number_of_steps].
Qed.

Theorem in_every_order_an_alignment_keeps_exactly_the_groups : forall o M k gs t d,
  Permutation (concat (fst (align_in o M k gs t d)) ++ snd (align_in o M k gs t d)) (concat gs).
Proof. intros [|before] M k gs t d; [apply an_alignment_emits_and_carries_exactly_its_groups|apply shuffling_keeps_exactly_the_groups]. Qed.

Lemma in_every_order_no_step_is_left_idle : forall o M k gs t d, gauge_ok M -> Forall (fun g => g <> []) gs -> t <= length (concat gs) ->
  Forall (fun g => g <> []) (fst (align_in o M k gs t d)).
Proof.
  intros [|before] M k gs t d ok F Lt; [apply a_rank_idles_only_when_it_has_fewer_samples_than_steps|apply shuffling_leaves_no_step_idle]; assumption.
Qed.

Lemma carried_in : forall o M k gs t d, exists way, snd (align_in o M k gs t d) = snd (align M way gs t d).
Proof. intros [|before] M k gs t d; [exists by_place; reflexivity|exists (fullest_first M); apply shuffle_snd]. Qed.
