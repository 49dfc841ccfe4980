(** The executable [compute_groups] of odb_ref/core/batching/grouping.py, and BUDGET and FEWEST for it. Spec: R2. *)
Require Import List Arith Lia Permutation Sorted.
From ODB Require Import Types.
Import ListNotations.

(** ** The model *)

Definition shorter (x y : sample) : bool :=
  (len x <? len y) || ((len x =? len y) && (pos x <=? pos y)).

Fixpoint insert (x : sample) (l : list sample) : list sample :=
  match l with
  | [] => [x]
  | y :: r => if shorter x y then x :: l else y :: insert x r
  end.

(** By length, ties by position. *)
Definition sort_length (l : list sample) : list sample := fold_right insert [] l.

(** [x], no shorter than any sample of [acc], would not fit any more: at most so many tokens are padding (R16.3). *)
Definition is_full (budget most : nat) (limits : list nat) (acc : group) (x : sample) : bool :=
  (budget <? S (length acc) * len x) || (most <? length acc * len x - total acc) || negb (is_within limits (x :: acc)).

(** [acc] is the group being formed, longest first. It is closed when the next sample would not fit. *)
Fixpoint sweep (budget most : nat) (limits : list nat) (acc : group) (l : list sample) : list group :=
  match l with
  | [] => match acc with [] => [] | _ => [acc] end
  | x :: r =>
      match acc with
      | [] => sweep budget most limits [x] r
      | _ => if is_full budget most limits acc x then acc :: sweep budget most limits [x] r else sweep budget most limits (x :: acc) r
      end
  end.

Definition compute_groups (budget most : nat) (limits : list nat) (window : list sample) : list group :=
  sweep budget most limits [] (sort_length window).

(** ** Sorting *)

Lemma insert_perm : forall x l, Permutation (insert x l) (x :: l).
Proof.
  induction l as [|y l IH]; simpl; [auto|]. destruct (shorter x y); [auto|].
  rewrite IH. apply perm_swap.
Qed.

Lemma sort_length_perm : forall l, Permutation (sort_length l) l.
Proof. induction l as [|x l IH]; simpl; [auto|]. rewrite insert_perm, IH. auto. Qed.

Definition ascending : list sample -> Prop := StronglySorted (fun x y => len x <= len y).
Definition descending : list sample -> Prop := StronglySorted (fun x y => len y <= len x).

Lemma insert_ascending : forall x l, ascending l -> ascending (insert x l).
Proof.
  induction l as [|y l IH]; simpl; intros H; [repeat constructor|].
  inversion H as [|? ? H1 H2]; subst. destruct (shorter x y) eqn:E.
  - assert (len x <= len y).
    { unfold shorter in E. apply Bool.orb_true_iff in E as [E|E]; [apply Nat.ltb_lt in E; lia|].
      apply Bool.andb_true_iff in E as [E _]. apply Nat.eqb_eq in E. lia. }
    constructor; [exact H|]. constructor; [assumption|]. eapply Forall_impl; [|exact H2]. simpl. intros; lia.
  - assert (len y <= len x).
    { unfold shorter in E. apply Bool.orb_false_iff in E as [E _]. apply Nat.ltb_ge in E. lia. }
    constructor; [apply IH, H1|]. rewrite Forall_forall in *. intros z Hz.
    apply (Permutation_in _ (insert_perm x l)) in Hz. destruct Hz as [->|Hz]; [assumption|auto].
Qed.

Lemma sort_length_ascending : forall l, ascending (sort_length l).
Proof. induction l; simpl; [constructor|]. apply insert_ascending; assumption. Qed.

Lemma strongly_sorted_snoc : forall (A : Type) (R : A -> A -> Prop) l x,
  StronglySorted R l -> Forall (fun y => R y x) l -> StronglySorted R (l ++ [x]).
Proof.
  induction l as [|y l IH]; simpl; intros x H F; [repeat constructor|].
  inversion H; subst. inversion F; subst. constructor; [auto|].
  apply Forall_app. split; [assumption|auto].
Qed.

Lemma rev_ascending : forall l, ascending l -> descending (rev l).
Proof.
  induction l as [|x l IH]; simpl; intros H; [constructor|]. inversion H; subst.
  apply strongly_sorted_snoc; [apply IH; assumption|]. apply Forall_rev. assumption.
Qed.

(** ** Nothing is lost, nothing is empty *)

Lemma sweep_perm : forall b most limits l acc, Permutation (concat (sweep b most limits acc l)) (acc ++ l).
Proof.
  induction l as [|x l IH]; intros acc; simpl.
  - destruct acc; simpl; rewrite ?app_nil_r; auto.
  - destruct acc as [|y acc]; [apply IH|]. destruct (is_full _ _ _ _ _).
    + simpl. rewrite IH. auto.
    + rewrite IH. simpl. rewrite <- Permutation_middle. apply perm_swap.
Qed.

Theorem groups_hold_exactly_the_window : forall b most limits w, Permutation (concat (compute_groups b most limits w)) w.
Proof. intros. unfold compute_groups. rewrite sweep_perm. simpl. apply sort_length_perm. Qed.

Theorem no_group_is_empty : forall b most limits w, Forall (fun g => g <> []) (compute_groups b most limits w).
Proof.
  intros b most limits w. unfold compute_groups.
  assert (H : forall l acc, Forall (fun g => g <> []) (sweep b most limits acc l)); [|apply H].
  induction l as [|x l IH]; intros acc; simpl.
  - destruct acc as [|y acc]; [constructor|]. constructor; [discriminate|constructor].
  - destruct acc as [|y acc]; [apply IH|]. destruct (is_full _ _ _ _ _); [constructor; [discriminate|]|]; apply IH.
Qed.

(** ** BUDGET *)

Definition acc_ok (b most : nat) (limits : list nat) (acc l : list sample) : Prop :=
  fits b most limits acc /\ forall x y, In x acc -> In y l -> len x <= len y.

Lemma sweep_fits : forall b most limits l acc, ascending l -> acc_ok b most limits acc l -> Forall (fits b most limits) (sweep b most limits acc l).
Proof.
  intros b most limits. induction l as [|x l IH]; intros acc So [F A]; simpl.
  - destruct acc as [|y acc]; [constructor|]. constructor; [assumption|constructor].
  - inversion So as [|? ? S1 S2]; subst. rewrite Forall_forall in S2.
    assert (One : acc_ok b most limits [x] l).
    { split; [left; simpl; lia|]. intros u v [->|[]] Hv. apply S2, Hv. }
    destruct acc as [|y acc]; [apply IH; assumption|].
    destruct (is_full _ _ _ _ _) eqn:E.
    + constructor; [assumption|]. apply IH; assumption.
    + apply Bool.orb_false_iff in E as [E Wa]. apply Bool.orb_false_iff in E as [E Pa]. apply Nat.ltb_ge in E, Pa. apply Bool.negb_false_iff in Wa. apply IH; [assumption|]. split.
      * assert (L : longest (x :: y :: acc) = len x).
        { simpl. apply Nat.max_l. apply (longest_bound (y :: acc)). intros z Hz. apply A; simpl; auto. }
        right. unfold padded. rewrite L. simpl in *. repeat split; [exact E|lia|exact Wa].
      * intros u v [->|Hu] Hv; [apply S2, Hv|]. apply A; [assumption|right; assumption].
Qed.

Theorem every_group_fits_the_budget : forall b most limits w, Forall (fits b most limits) (compute_groups b most limits w).
Proof.
  intros. apply sweep_fits; [apply sort_length_ascending|]. split; [left; simpl; lia|]. intros x y H; destruct H.
Qed.

(** The first sample of a group is its longest, so the Python's padding is the true one. *)
Theorem first_sample_of_a_group_is_the_longest : forall b most limits w, Forall (fun g => padded_first g = padded g) (compute_groups b most limits w).
Proof.
  intros b most limits w. unfold compute_groups.
  assert (H : forall l acc, ascending l -> (forall x y, In x acc -> In y l -> len x <= len y) -> padded_first acc = padded acc ->
    Forall (fun g => padded_first g = padded g) (sweep b most limits acc l)).
  { induction l as [|x l IH]; intros acc So A P; simpl.
    - destruct acc as [|y acc]; [constructor|]. constructor; [assumption|constructor].
    - inversion So as [|? ? S1 S2]; subst. rewrite Forall_forall in S2.
      assert (One : padded_first [x] = padded [x]) by (unfold padded; simpl; lia).
      assert (Two : forall u v, In u [x] -> In v l -> len u <= len v) by (intros u v [->|[]] Hv; apply S2, Hv).
      destruct acc as [|y acc]; [apply IH; assumption|].
      destruct (is_full _ _ _ _ _).
      + constructor; [assumption|]. apply IH; assumption.
      + apply IH; [assumption| |].
        * intros u v [->|Hu] Hv; [apply S2, Hv|]. apply A; [assumption|right; assumption].
        * unfold padded_first, padded. f_equal. change (longest (x :: y :: acc)) with (Nat.max (len x) (longest (y :: acc))).
          assert (longest (y :: acc) <= len x) by (apply longest_bound; intros z Hz; apply A; simpl; auto). lia. }
  apply H; [apply sort_length_ascending| |reflexivity]. intros u v Hu; destruct Hu.
Qed.

(** ** FEWEST, part 1: any partition that fits can be had as runs of the sorted samples

    For tokens alone, with no further limits. Counting argument: [count_ge t l] samples are at least [t] long. The group that
    holds a sample at least as long as the longest one left may be replaced by the same number of the longest samples left. *)

Fixpoint count_ge (t : nat) (l : list sample) : nat :=
  match l with [] => 0 | x :: r => (if t <=? len x then 1 else 0) + count_ge t r end.

Lemma count_ge_app : forall t l m, count_ge t (l ++ m) = count_ge t l + count_ge t m.
Proof. induction l as [|x l IH]; simpl; intros m; [reflexivity|]. rewrite IH. lia. Qed.

Lemma count_ge_length : forall t l, count_ge t l <= length l.
Proof. induction l as [|x l IH]; simpl; [lia|]. destruct (t <=? len x); lia. Qed.

Lemma count_ge_perm : forall t l m, Permutation l m -> count_ge t l = count_ge t m.
Proof. induction 1; simpl; lia. Qed.

Lemma count_ge_pos : forall t l, 1 <= count_ge t l -> exists x, In x l /\ t <= len x.
Proof.
  induction l as [|x l IH]; simpl; intros H; [lia|]. destruct (t <=? len x) eqn:E.
  - apply Nat.leb_le in E. eauto.
  - destruct (IH H) as [y [? ?]]. eauto.
Qed.

Lemma count_ge_none : forall t l, (forall x, In x l -> len x < t) -> count_ge t l = 0.
Proof.
  induction l as [|x l IH]; simpl; intros H; [reflexivity|].
  assert (len x < t) by auto. destruct (t <=? len x) eqn:E; [apply Nat.leb_le in E; lia|]. apply IH. auto.
Qed.

Lemma count_ge_skipn : forall t l n, descending l -> count_ge t (skipn n l) <= count_ge t l - n.
Proof.
  induction l as [|x l IH]; intros n H.
  - rewrite skipn_nil. simpl. lia.
  - destruct n as [|n]; simpl skipn; [lia|]. inversion H as [|? ? H1 H2]; subst.
    specialize (IH n H1). simpl. destruct (t <=? len x) eqn:E; [lia|].
    assert (count_ge t l = 0); [|lia].
    apply count_ge_none. intros y Hy. rewrite Forall_forall in H2. specialize (H2 y Hy). apply Nat.leb_gt in E. lia.
Qed.

Lemma descending_skipn : forall l n, descending l -> descending (skipn n l).
Proof.
  induction l as [|x l IH]; intros n H; [rewrite skipn_nil; constructor|].
  destruct n; [exact H|]. inversion H; subst. simpl. apply IH. assumption.
Qed.

Lemma descending_head : forall x l, descending (x :: l) -> longest (x :: l) = len x.
Proof.
  intros x l H. inversion H as [|? ? H1 H2]; subst. simpl. rewrite Forall_forall in H2.
  assert (longest l <= len x) by (apply longest_bound; intros; apply H2; assumption). lia.
Qed.

Lemma in_firstn : forall (A : Type) n (l : list A) x, In x (firstn n l) -> In x l.
Proof. intros A n l x H. rewrite <- (firstn_skipn n l). apply in_or_app. auto. Qed.

Lemma partition_as_runs : forall b n P l, length P = n -> descending l -> Forall (fits b b []) P ->
  (forall t, count_ge t l <= count_ge t (concat P)) ->
  exists Q, concat Q = l /\ Forall (fits b b []) Q /\ length Q <= n.
Proof.
  induction n as [|n IH]; intros P l Na So F D.
  - destruct P; [|discriminate]. exists []. destruct l as [|x l]; [repeat split; auto|].
    specialize (D 0). simpl in D. lia.
  - destruct l as [|x l]; [exists []; repeat split; auto; simpl; lia|].
    assert (C : 1 <= count_ge (len x) (concat P)).
    { eapply Nat.le_trans; [|apply D]. simpl. rewrite Nat.leb_refl. lia. }
    destruct (count_ge_pos _ _ C) as [y [Hy Ly]].
    apply in_concat in Hy as [g [Hg Hy]]. destruct (in_split _ _ Hg) as [P1 [P2 ->]].
    assert (Lg : 1 <= length g) by (destruct g; [destruct Hy|simpl; lia]).
    destruct (IH (P1 ++ P2) (skipn (length g) (x :: l))) as [Q [Q1 [Q2 Q3]]].
    + rewrite app_length in *. simpl in Na. lia.
    + apply descending_skipn, So.
    + rewrite Forall_app in *. destruct F as [F1 F2]. inversion F2; subst. split; assumption.
    + intros t. eapply Nat.le_trans; [apply count_ge_skipn, So|]. specialize (D t).
      rewrite concat_app in D. simpl in D. rewrite !count_ge_app in D. rewrite concat_app, count_ge_app.
      assert (count_ge t g <= length g) by apply count_ge_length.
      change (count_ge t (x :: l)) with ((if t <=? len x then 1 else 0) + count_ge t l) in *. lia.
    + exists (firstn (length g) (x :: l) :: Q). simpl concat. rewrite Q1, firstn_skipn. split; [reflexivity|]. split; [|simpl; lia].
      constructor; [|assumption].
      assert (Fg : fits b b [] g) by (rewrite Forall_app in F; destruct F as [_ F2]; inversion F2; assumption).
      assert (Ln : length (firstn (length g) (x :: l)) <= length g) by apply firstn_le_length.
      destruct Fg as [Fg|[Fg _]]; [left; lia|]. right. enough (padded (firstn (length g) (x :: l)) <= b) by (repeat split; lia).
      unfold padded in *. eapply Nat.le_trans; [|exact Fg]. apply Nat.mul_le_mono; [exact Ln|].
      apply Nat.le_trans with (len x); [|apply Nat.le_trans with (len y); [exact Ly|apply longest_le, Hy]].
      rewrite <- (descending_head x l So). apply longest_incl. intros z. apply in_firstn.
Qed.

(** ** FEWEST, part 2: the sweep is never behind any other cut of the sorted samples into runs *)

Lemma drop_empty : forall (Q : list group) x l, concat Q = x :: l ->
  exists r Q', l = r ++ concat Q' /\ (forall P : group -> Prop, Forall P Q -> P (x :: r) /\ Forall P Q') /\ S (length Q') <= length Q.
Proof.
  induction Q as [|q Q IH]; simpl; intros x l H; [discriminate|]. destruct q as [|y q].
  - destruct (IH x l H) as [r [Q' [E [F L]]]]. exists r, Q'. split; [exact E|]. split; [|simpl in *; lia].
    intros P FP. inversion FP; subst. apply F. assumption.
  - simpl in H. injection H as -> <-. exists q, Q. split; [reflexivity|]. split; [|simpl in *; lia].
    intros P FP. inversion FP; subst. auto.
Qed.

Lemma sweep_is_never_behind : forall b l acc, acc <> [] ->
  (forall Q, Forall (fits b b []) Q -> concat Q = l -> ascending l -> length (sweep b b [] acc l) <= S (length Q)) /\
  (forall before rest Q, Forall (fits b b []) Q -> l = rest ++ concat Q -> fits b b [] (before ++ acc ++ rest) -> ascending l ->
     length (sweep b b [] acc l) <= S (length Q)).
Proof.
  induction l as [|x l IH]; intros acc NE.
  - destruct acc as [|y acc]; [easy|]. split; intros; simpl; lia.
  - assert (Loose : forall Q, Forall (fits b b []) Q -> concat Q = x :: l -> ascending (x :: l) ->
                    length (sweep b b [] acc (x :: l)) <= S (length Q)).
    { intros Q F E So. inversion So as [|? ? S1 S2]; subst.
      destruct (drop_empty Q x l E) as [r [Q' [El [FQ LQ]]]]. destruct (FQ _ F) as [Fx FQ'].
      destruct acc as [|y acc]; [easy|]. simpl sweep. destruct (is_full _ _ _ _ _).
      - destruct (IH [x]) as [_ T]; [discriminate|]. specialize (T [] r Q' FQ' El Fx S1). simpl. lia.
      - destruct (IH (x :: y :: acc)) as [T _]; [discriminate|].
        assert (Fr : Forall (fits b b []) (r :: Q')).
        { constructor; [|assumption]. apply (fits_part b b [] r [x] (x :: r)); [|exact Fx]. symmetry. apply Permutation_cons_append. }
        specialize (T (r :: Q') Fr (eq_sym El) S1). simpl in *. lia. }
    split; [exact Loose|]. intros before rest Q F E Fq So. destruct rest as [|z rest].
    + apply Loose; auto.
    + simpl in E. injection E as -> E. inversion So as [|? ? S1 S2]; subst l.
      destruct acc as [|y acc]; [easy|].
      assert (Fit : is_full b b [] (y :: acc) z = false).
      { enough (S (length (y :: acc)) * len z <= b) by (apply Bool.orb_false_iff; split; [apply Bool.orb_false_iff; split; apply Nat.ltb_ge; simpl in *; lia|reflexivity]).
        destruct Fq as [Fq|[Fq _]].
        - rewrite !app_length in Fq. simpl in Fq. lia.
        - unfold padded in Fq. eapply Nat.le_trans; [|exact Fq]. apply Nat.mul_le_mono.
          + rewrite !app_length. simpl. lia.
          + apply longest_le. apply in_or_app. right. apply in_or_app. right. left. reflexivity. }
      assert (Eq : sweep b b [] (y :: acc) (z :: rest ++ concat Q) = sweep b b [] (z :: y :: acc) (rest ++ concat Q)).
      { cbn [sweep]. rewrite Fit. reflexivity. }
      rewrite Eq.
      destruct (IH (z :: y :: acc)) as [_ T]; [discriminate|].
      apply (T before rest Q F eq_refl); [|exact S1].
      eapply fits_perm; [|exact Fq]. apply Permutation_app_head.
      change ((z :: y :: acc) ++ rest) with (z :: ((y :: acc) ++ rest)). symmetry. apply Permutation_middle.
Qed.

Lemma runs_reversed : forall b (Q : list group), Forall (fits b b []) Q ->
  Forall (fits b b []) (rev (map (@rev sample) Q)) /\ concat (rev (map (@rev sample) Q)) = rev (concat Q) /\
  length (rev (map (@rev sample) Q)) = length Q.
Proof.
  intros b Q F. repeat split.
  - apply Forall_rev. apply Forall_map. eapply Forall_impl; [|exact F]. intros g Hg. eapply fits_perm; [apply Permutation_rev|exact Hg].
  - induction Q as [|q Q IH]; simpl; [reflexivity|]. inversion F; subst. rewrite concat_app, IH by assumption. simpl.
    rewrite app_nil_r, rev_app_distr. reflexivity.
  - rewrite rev_length, map_length. reflexivity.
Qed.

Theorem no_partition_under_the_budget_has_fewer_groups : forall b w P,
  Permutation (concat P) w -> Forall (fits b b []) P -> length (compute_groups b b [] w) <= length P.
Proof.
  intros b w P Pm F. unfold compute_groups. set (l := sort_length w).
  assert (A : ascending l) by apply sort_length_ascending.
  destruct (partition_as_runs b (length P) P (rev l)) as [Q [E [FQ LQ]]]; auto.
  - apply rev_ascending, A.
  - intros t. apply Nat.eq_le_incl, count_ge_perm. rewrite <- Permutation_rev. rewrite Pm. apply sort_length_perm.
  - destruct (runs_reversed b Q FQ) as [FR [ER LR]]. rewrite E, rev_involutive in ER.
    destruct l as [|x l0] eqn:El; [simpl; lia|].
    destruct (drop_empty _ x l0 ER) as [r [Q' [E2 [FQ2 L2]]]]. destruct (FQ2 _ FR) as [Fx FQ'].
    simpl sweep. destruct (sweep_is_never_behind b l0 [x]) as [_ T]; [discriminate|].
    inversion A; subst l0. specialize (T [] r Q' FQ' eq_refl Fx). 
    assert (length (sweep b b [] [x] (r ++ concat Q')) <= S (length Q')) by (apply T; assumption). lia.
Qed.

(** With a further limit this is not so: amounts of 2, 3, 2 and 1 in order of length make two groups within 4, the sweep three. *)
Theorem with_limits_the_sweep_may_use_more_groups_than_needed : exists b limits w P,
  Permutation (concat P) w /\ Forall (fits b b limits) P /\ length P < length (compute_groups b b limits w).
Proof.
  set (x n c := mkSample n n 1 0 [c]).
  exists 4, [4], [x 0 2; x 1 3; x 2 2; x 3 1], [[x 0 2; x 2 2]; [x 1 3; x 3 1]]. split; [|split].
  - simpl. apply perm_skip, perm_swap.
  - repeat constructor; right; split; simpl; auto.
  - simpl. lia.
Qed.
