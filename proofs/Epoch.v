(** RESUME, COVER and ONCE over a whole epoch in which the number of ranks changes (R10.3): each job of [Resume.v] runs on what the jobs
    before it had left ([Rest.v]). Together they train on each item of the epoch once. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local System Facts Protocol Replay Rest Resume.
Import ListNotations.

Section Epoch.
Variable A : Type.

(** The items at the positions [f r] of each rank [r], if [W] ranks share out a list. *)
Definition items (W : nat) (order : list A) (f : nat -> list nat) : list A :=
  concat (map (fun r => pick (pick order (share_of W r (length order))) (f r)) (seq 0 W)).

(** A job of [W] ranks on a list: its configurations agree, and rank [r] reads its share from the first place to the last. *)
Record serves (W : nat) (c : config) (input : nat -> list sample) (order : list A) : Prop := {
  sv_setting : setting_ok W (fun _ => c);
  sv_placed : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i;
  sv_length : forall r, r < W -> length (input r) = length (share_of W r (length order)) }.

Definition positions (u : state) : list nat := map pos (samples_of (steps_of u)).

(** [trained] is what was trained on of [order], and [left] what is shared out next. A job is left when each rank [r] has saved, at its own
    moment, and has taken the further positions [t r], which it had not planned when it saved. *)
Inductive trained_on (order : list A) : list A -> list A -> Prop :=
| trained_on_nothing : trained_on order [] order
| trained_on_more : forall trained left W c src input depths moments t,
    trained_on order trained left -> serves W c input left ->
    (forall r, r < W -> job W c src input (depths r) (moments r) /\ has_begun c (rank_of (moments r) r)) ->
    (forall r, r < W -> NoDup (t r) /\ forall p, In p (t r) -> p < length (input r) /\ ~ In p (positions (rank_of (moments r) r))) ->
    trained_on order (trained ++ items W left (fun r => positions (rank_of (moments r) r) ++ t r))
      (generation_rest (map (fun r => checkpoint_of (save (rank_of (moments r) r)) (t r)) (seq 0 W)) left).

Lemma pick_concat : forall (B C : Type) (l : list B) (f : C -> list nat) xs, pick l (concat (map f xs)) = concat (map (fun x => pick l (f x)) xs).
Proof. intros B C l f. induction xs as [|x xs IH]; [reflexivity|]. simpl. rewrite pick_app, IH. reflexivity. Qed.

Lemma share_bound : forall W r n, Forall (fun i => i < n) (share_of W r n).
Proof. intros W r n. apply Forall_forall. intros i I. apply filter_In in I as [I _]. apply in_seq in I. lia. Qed.

Lemma by_rank_map : forall (B C : Type) (f : nat -> B -> list C) (g : nat -> B) n, by_rank f (map g (seq 0 n)) = concat (map (fun r => f r (g r)) (seq 0 n)).
Proof.
  intros B C f g n. unfold by_rank. rewrite map_length, seq_length. f_equal. generalize 0. induction n as [|n IH]; intros m; [reflexivity|]. simpl. f_equal. apply IH.
Qed.

Lemma pick_length : forall (l : list A) places, Forall (fun i => i < length l) places -> length (pick l places) = length places.
Proof.
  intros l places F. induction F as [|i places Hi F IH]; [reflexivity|]. unfold pick in *. simpl. destruct (nth_error l i) eqn:E; [simpl; f_equal; exact IH|apply nth_error_None in E; lia].
Qed.

Lemma position_bound : forall W c src input d s r, setting_ok W (fun _ => c) -> (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) -> r < W ->
  job W c src input d s -> NoDup (positions (rank_of s r)) /\ forall p, In p (positions (rank_of s r)) -> p < length (input r).
Proof.
  intros W c src input d s r ok placed H J. pose proof (nothing_is_lost_in_a_job W c src input ok placed d s r J H) as P. simpl in P. apply (Permutation_map pos) in P. rewrite map_app in P.
  rewrite (map_numbered _ _ pos (fun i => i) (input r) (fun i x => placed r i x H)), map_id in P. fold (positions (rank_of s r)) in P. split.
  - exact (NoDup_first _ _ _ (Permutation_NoDup (Permutation_sym P) (seq_NoDup _ _))).
  - intros p I. assert (J' : In p (seq 0 (length (input r)))) by (apply (Permutation_in _ P), in_or_app; left; exact I). apply in_seq in J'. lia.
Qed.

(** A rank's checkpoint calls exactly those positions taken that the rank has taken. *)
Lemma taken_by_a_rank : forall W c src input order d s r t, serves W c input order -> r < W -> job W c src input d s -> has_begun c (rank_of s r) ->
  (NoDup t /\ forall p, In p t -> p < length (input r) /\ ~ In p (positions (rank_of s r))) ->
  let k := checkpoint_of (save (rank_of s r)) t in let places := share_of W r (length order) in
  sound (length places) k /\ Permutation (pick places (positions (rank_of s r) ++ t)) (part_taken places k).
Proof.
  intros W c src input order d s r t [ok placed len] H J B [Dt Ht] k places. unfold places. rewrite <- (len r H).
  destruct (position_bound W c src input d s r ok placed H J) as [Dp Bp].
  assert (Un : forall p, In p t -> k_read_samples k <= p \/ In p (k_carried k)).
  { intros p I. destruct (Ht p I) as [_ Np]. destruct (a_checkpoint_tells_what_was_taken W c src input ok placed d s r [] J H B) as [_ T]. specialize (T ltac:(intros q []) p).
    unfold k, checkpoint_of. cbn [k_read_samples k_carried]. unfold is_taken, checkpoint_of in T. cbn [k_read_samples k_carried k_taken] in T.
    destruct (b_read (save (rank_of s r)) <=? p) eqn:E; [left; apply Nat.leb_le, E|]. cbn [orb] in T.
    destruct (among p (map pos (b_carried (save (rank_of s r))))) eqn:M; [right; apply among_in, M|]. exfalso. destruct (proj1 T eq_refl) as [I'|[]]. exact (Np I'). }
  destruct (a_checkpoint_tells_what_was_taken W c src input ok placed d s r t J H B) as [So T]. fold k in So, T. specialize (T Un). split; [exact So|].
  unfold part_taken. rewrite <- (len r H). apply pick_perm, NoDup_Permutation.
  - apply (NoDup_app_of _ _ _ Dp Dt). intros p I I'. destruct (Ht p I') as [_ N1]. exact (N1 I).
  - apply NoDup_filter, seq_NoDup.
  - intros p. rewrite in_app_iff, filter_In, in_seq, T. fold (positions (rank_of s r)). split; [|intros [_ I]; exact I]. intros I. split; [|exact I].
    destruct I as [I|I]; [specialize (Bp p I)|destruct (Ht p I)]; lia.
Qed.

Lemma one_job_splits : forall W c src input order depths moments t, serves W c input order ->
  (forall r, r < W -> job W c src input (depths r) (moments r) /\ has_begun c (rank_of (moments r) r)) ->
  (forall r, r < W -> NoDup (t r) /\ forall p, In p (t r) -> p < length (input r) /\ ~ In p (positions (rank_of (moments r) r))) ->
  Permutation (items W order (fun r => positions (rank_of (moments r) r) ++ t r) ++
    generation_rest (map (fun r => checkpoint_of (save (rank_of (moments r) r)) (t r)) (seq 0 W)) order) order.
Proof.
  intros W c src input order depths moments t Sv J Ht. set (k := fun r => checkpoint_of (save (rank_of (moments r) r)) (t r)).
  assert (Each : forall r, r < W -> sound (length (share_of W r (length order))) (k r) /\
    Permutation (pick (share_of W r (length order)) (positions (rank_of (moments r) r) ++ t r)) (part_taken (share_of W r (length order)) (k r))).
  { intros r H. destruct (J r H) as [J1 J2]. apply (taken_by_a_rank W c src input order (depths r) (moments r) r (t r) Sv H J1 J2 (Ht r H)). }
  assert (Ln : length (map k (seq 0 W)) = W) by (rewrite map_length; apply seq_length).
  assert (Sp : sound_parts (length order) (map k (seq 0 W))).
  { pose proof (some_rank _ _ (sv_setting _ _ _ _ Sv)). split; [destruct W; [lia|discriminate]|]. rewrite Ln. intros r q E. assert (H' : r < W) by (rewrite <- Ln; apply nth_error_Some; congruence).
    rewrite (map_nth_error k _ _ (nth_error_seq W r H')) in E. injection E as <-. apply Each, H'. }
  etransitivity; [|exact (generation_splits A _ order Sp)]. apply Permutation_app_tail. unfold generation_taken. rewrite Ln, by_rank_map, pick_concat. unfold items.
  apply concat_perms. intros r Hr. apply in_seq in Hr. rewrite pick_pick by apply share_bound. apply pick_perm. apply Each. lia.
Qed.

Theorem what_was_trained_on_and_what_is_left_are_the_epoch : forall order trained left, trained_on order trained left -> Permutation (trained ++ left) order.
Proof.
  intros order trained left T. induction T as [|trained left W c src input depths moments t T IH Sv J Ht]; [reflexivity|].
  rewrite <- app_assoc, (one_job_splits W c src input left depths moments t Sv J Ht). exact IH.
Qed.

Theorem over_any_number_of_ranks_no_item_is_planned_twice : forall order trained left W c src input d s, trained_on order trained left -> serves W c input left ->
  job W c src input d s -> exists others, Permutation (trained ++ items W left (fun r => positions (rank_of s r)) ++ others) order.
Proof.
  intros order trained left W c src input d s T Sv J. destruct Sv as [ok placed len]. pose proof (what_was_trained_on_and_what_is_left_are_the_epoch order trained left T) as P.
  exists (items W left (fun r => filter (fun p => negb (among p (positions (rank_of s r)))) (seq 0 (length (input r))))). rewrite <- P. apply Permutation_app_head.
  etransitivity; [|exact (the_shares_of_the_new_ranks_are_what_is_left A W left (some_rank _ _ ok))]. unfold items.
  rewrite <- concat_map_app. apply concat_perms. intros r Hr. apply in_seq in Hr. assert (H : r < W) by lia. destruct (position_bound W c src input d s r ok placed H J) as [Dp Bp]. rewrite <- pick_app.
  set (places := share_of W r (length left)). assert (Lp : length (pick left places) = length (input r)) by (rewrite (len r H); apply pick_length, share_bound).
  transitivity (pick (pick left places) (seq 0 (length (input r)))); [apply pick_perm, NoDup_Permutation|rewrite <- Lp, pick_all; reflexivity].
  - apply (NoDup_app_of _ _ _ Dp); [apply NoDup_filter, seq_NoDup|]. intros p I I'. apply filter_In in I' as [_ I']. apply negb_true_iff in I'. apply among_in in I. congruence.
  - apply seq_NoDup.
  - intros p. rewrite in_app_iff, filter_In, in_seq. split; [intros [I|[I _]]; [specialize (Bp p I)|]; lia|]. intros I. destruct (among p (positions (rank_of s r))) eqn:M; [left; apply among_in, M|right; auto].
Qed.

Theorem over_any_number_of_ranks_each_item_is_planned_exactly_once : forall order trained left W c src input d s, trained_on order trained left -> serves W c input left ->
  job W c src input d s -> c_is_quota c = false -> c_quota c = None ->
  (forall r, r < W -> is_ending (rank_of s r) = true /\ ended_as (rank_of s r) = Some Complete) ->
  Permutation (trained ++ items W left (fun r => positions (rank_of s r))) order.
Proof.
  intros order trained left W c src input d s T Sv J Jm Nq E. destruct (over_any_number_of_ranks_no_item_is_planned_twice order trained left W c src input d s T Sv J) as [others P].
  destruct Sv as [ok placed len]. assert (L : length (items W left (fun r => positions (rank_of s r))) = length left).
  { rewrite <- (Permutation_length (the_shares_of_the_new_ranks_are_what_is_left A W left (some_rank _ _ ok))). unfold items. apply Permutation_length, concat_perms.
    intros r Hr. apply in_seq in Hr. assert (H : r < W) by lia. destruct (E r H) as [E1 E2].
    pose proof (a_complete_rank_of_a_job_has_planned_its_whole_input W c src input ok placed d s r J H Jm Nq E1 E2) as C. apply (Permutation_map pos) in C. fold (positions (rank_of s r)) in C.
    rewrite (pick_perm _ _ _ _ C), (map_numbered _ _ pos (fun i => i) (input r) (fun i x => placed r i x H)), map_id, (len r H). rewrite <- (pick_all A (pick left (share_of W r (length left)))) at 2.
    apply pick_perm. rewrite pick_length by apply share_bound. reflexivity. }
  pose proof (what_was_trained_on_and_what_is_left_are_the_epoch order trained left T) as Q. pose proof (Permutation_length P) as P1. rewrite <- (Permutation_length Q), !app_length, L in P1.
  destruct others; [rewrite app_nil_r in P; exact P|simpl in P1; lia].
Qed.
End Epoch.
