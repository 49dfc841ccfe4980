(** The executable [compute_rows] of odb_ref/core/batching/grouping.py, packed grouping. It keeps BUDGET, and no two of its groups fit
    together (ANY-FIT). So for tokens alone there are at most twice as many groups as needed. Spec: R2.5. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Lists Types Alignment.
Import ListNotations.
Arguments Nat.eqb : simpl never.
Arguments Nat.leb : simpl never.

(** ** The model *)

Definition is_roomy (budget : nat) (limits : list nat) (g : group) : bool := (total g <=? budget) && is_within limits g.

(** BUDGET: a row of two or more samples fits the budget and keeps every limit; a single sample may exceed them. *)
Definition fits_packed (budget : nat) (limits : list nat) (g : group) : Prop :=
  length g <= 1 \/ is_roomy budget limits g = true.

Definition longer (x y : sample) : bool := (len y <? len x) || ((len x =? len y) && (pos x <=? pos y)).

(** By falling length; ties by position. *)
Notation sort_longest := (sort_by longer).

Section Packing.
Variables (budget : nat) (limits : list nat).

(** [x] fits into the row [g]. *)
Definition is_open (x : sample) (g : group) : bool := is_roomy budget limits (g ++ [x]).

(** One more than the tokens of the fullest row into which [x] fits, or 0 if there is no such row. *)
Definition fullest (x : sample) (gs : list group) : nat :=
  fold_right (fun g most => if is_open x g then Nat.max (S (total g)) most else most) 0 gs.

(** [x] joins the first row into which it fits and that has [most] - 1 tokens, or begins a row of its own. *)
Fixpoint put (x : sample) (most : nat) (gs : list group) : list group :=
  match gs with
  | [] => [[x]]
  | g :: r => if is_open x g && (S (total g) =? most) then (g ++ [x]) :: r else g :: put x most r
  end.

Definition place (gs : list group) (x : sample) : list group := put x (fullest x gs) gs.

(** Adds to [acc] the oldest samples: those of [l], which is sorted by position, up to the first that does not fit. *)
Fixpoint oldest (acc : group) (l : list sample) : group :=
  match l with
  | [] => acc
  | x :: r => if (length acc =? 0) || is_open x acc then oldest (acc ++ [x]) r else acc
  end.

(** The oldest samples first, then the others by falling length. *)
Definition line_up (window : list sample) : list sample :=
  let l := by_position window in
  let g := oldest [] l in
  g ++ sort_longest (skipn (length g) l).

Definition fill_rows (window : list sample) : list group := fold_left place (line_up window) [].

Definition compute_rows (window : list sample) : list group := map sort_longest (fill_rows window).

Lemma roomy_perm : forall g h, Permutation g h -> is_roomy budget limits g = is_roomy budget limits h.
Proof.
  intros g h P. unfold is_roomy. rewrite (sum_over_perm len P). f_equal. apply eq_true_iff_eq.
  split; apply is_within_le; intros r; rewrite (sum_over_perm _ P); lia.
Qed.

(** ** Nothing is lost *)

(** A sample joins one row into which it fits or, if there is none, begins a row of its own. *)
Lemma place_is : forall x gs, (exists a g b, gs = a ++ g :: b /\ is_open x g = true /\ place gs x = a ++ (g ++ [x]) :: b) \/
  (Forall (fun g => is_open x g = false) gs /\ place gs x = gs ++ [[x]]).
Proof.
  intros x gs. unfold place.
  assert (P : forall most gs, (exists a g b, gs = a ++ g :: b /\ is_open x g = true /\ put x most gs = a ++ (g ++ [x]) :: b) \/
    Forall (fun g => is_open x g && (S (total g) =? most) = false) gs /\ put x most gs = gs ++ [[x]]).
  { clear gs. intros most. induction gs as [|g gs IH]; simpl; [right; auto|]. destruct (is_open x g && _) eqn:M.
    - apply andb_true_iff in M as [O _]. left. exists [], g, gs. auto.
    - destruct IH as [[a [h [b [-> [O ->]]]]]|[F ->]]; [left; exists (g :: a), h, b; auto|right; auto]. }
  destruct (P (fullest x gs) gs) as [C|[F E]]; [left; exact C|right; split; [|exact E]]. clear P E.
  (* If some row were open, one of the open rows would hold what the fullest of them holds. *)
  assert (Nh : fullest x gs = 0 \/ exists g, In g gs /\ is_open x g && (S (total g) =? fullest x gs) = true).
  { clear F. induction gs as [|g gs IH]; [auto|]. cbn [fullest fold_right In] in *. fold (fullest x gs) in *.
    destruct (is_open x g) eqn:O; [right|destruct IH as [IH|[h [I H]]]; eauto].
    destruct (Nat.max_spec (S (total g)) (fullest x gs)) as [[L ->]|[L ->]].
    - destruct IH as [IH|[h [I H]]]; [lia|eauto].
    - exists g. rewrite O, Nat.eqb_refl. auto. }
  rewrite Forall_forall in F. destruct Nh as [Nh|[g [I H]]]; [|rewrite (F g I) in H; discriminate].
  apply Forall_forall. revert Nh. clear F. induction gs as [|g gs IH]; [easy|]. cbn [fullest fold_right]. fold (fullest x gs). intros Nh h I.
  destruct (is_open x g) eqn:O; [lia|]. destruct I as [<-|I]; auto.
Qed.

Lemma placing_keeps : forall P : list group -> Prop,
  (forall x a g b, is_open x g = true -> P (a ++ g :: b) -> P (a ++ (g ++ [x]) :: b)) ->
  (forall x gs, Forall (fun g => is_open x g = false) gs -> P gs -> P (gs ++ [[x]])) -> forall l gs, P gs -> P (fold_left place l gs).
Proof.
  intros P J Nh. induction l as [|x l IH]; simpl; intros gs H; [exact H|]. apply IH.
  destruct (place_is x gs) as [[a [g [b [-> [O ->]]]]]|[F ->]]; auto.
Qed.

Lemma placing_keeps_each : forall P : group -> Prop, (forall x g, is_open x g = true -> P g -> P (g ++ [x])) -> (forall x, P [x]) ->
  forall l gs, Forall P gs -> Forall P (fold_left place l gs).
Proof.
  intros P J Nh. apply placing_keeps; intros x.
  - intros a g b O F. rewrite Forall_app in *. destruct F as [A F]. inversion F; subst. auto.
  - intros gs _ F. apply Forall_app. auto.
Qed.

Lemma fold_place_perm : forall l gs, Permutation (concat (fold_left place l gs)) (concat gs ++ l).
Proof.
  induction l as [|x l IH]; intros gs; simpl; [rewrite app_nil_r; auto|]. rewrite IH, <- (Permutation_middle (concat gs)).
  apply (Permutation_app_tail l (l' := x :: concat gs)). destruct (place_is x gs) as [[a [g [b [-> [_ ->]]]]]|[_ ->]]; rewrite !concat_app; simpl.
  - rewrite <- app_assoc. simpl. rewrite <- (Permutation_middle g), <- Permutation_middle. reflexivity.
  - symmetry. apply Permutation_cons_append.
Qed.

Lemma oldest_prefix : forall l acc, exists r, oldest acc l = acc ++ r /\ exists s, l = r ++ s.
Proof.
  induction l as [|x l IH]; intros acc; simpl.
  - exists []. rewrite app_nil_r. split; [reflexivity|]. exists []. reflexivity.
  - destruct ((length acc =? 0) || is_open x acc).
    + destruct (IH (acc ++ [x])) as [r [E [s ->]]]. exists (x :: r). rewrite E, <- app_assoc. split; [reflexivity|]. exists s. reflexivity.
    + exists []. rewrite app_nil_r. split; [reflexivity|]. exists (x :: l). reflexivity.
Qed.

Lemma line_up_perm : forall w, Permutation (line_up w) w.
Proof.
  intros w. unfold line_up. destruct (oldest_prefix (by_position w) []) as [r [E [s S]]]. simpl in E.
  rewrite E, sort_by_perm. rewrite S at 1. rewrite skipn_app, skipn_all, Nat.sub_diag. simpl. rewrite <- S. apply sort_by_perm.
Qed.

Lemma sorted_rows_perm : forall gs, Permutation (concat (map sort_longest gs)) (concat gs).
Proof. induction gs as [|g gs IH]; simpl; [auto|]. apply Permutation_app; [apply sort_by_perm|exact IH]. Qed.

Theorem rows_hold_exactly_the_window : forall w, Permutation (concat (compute_rows w)) w.
Proof.
  intros w. unfold compute_rows, fill_rows. rewrite sorted_rows_perm, fold_place_perm. simpl. apply line_up_perm.
Qed.

Theorem no_row_is_empty : forall w, Forall (fun g => g <> []) (compute_rows w).
Proof.
  intros w. apply Forall_map. eapply Forall_impl; [|apply (placing_keeps_each (fun g => g <> [])); [intros x [|y g]| |constructor]; discriminate].
  intros g Ne E. apply Ne, Permutation_nil. rewrite <- E. apply sort_by_perm.
Qed.

(** ** The oldest samples share the first row *)

(** The oldest samples fill the first row one by one. *)
Lemma oldest_fill : forall l acc, acc <> [] -> exists r, oldest acc l = acc ++ r /\ fold_left place r [acc] = [acc ++ r].
Proof.
  induction l as [|x l IH]; intros acc Ne; simpl.
  - exists []. rewrite app_nil_r. auto.
  - destruct acc as [|y acc]; [contradiction|]. change (length (y :: acc) =? 0) with false. rewrite orb_false_l.
    destruct (is_open x (y :: acc)) eqn:O; [|exists []; rewrite app_nil_r; auto].
    destruct (IH ((y :: acc) ++ [x])) as [r [E F]]; [discriminate|]. exists (x :: r). rewrite E. cbn [fold_left].
    replace (place [y :: acc] x) with [(y :: acc) ++ [x]].
    + rewrite F, <- app_assoc. auto.
    + unfold place, fullest. cbn [fold_right put]. rewrite O, Nat.max_0_r, Nat.eqb_refl. reflexivity.
Qed.

Lemma first_row_grows : forall l g gs, exists r hs, fold_left place l (g :: gs) = (g ++ r) :: hs.
Proof.
  induction l as [|x l IH]; intros g gs; cbn [fold_left].
  - exists [], gs. rewrite app_nil_r. reflexivity.
  - unfold place at 2. cbn [put]. destruct (_ && _).
    + destruct (IH (g ++ [x]) gs) as [r [hs E]]. exists (x :: r), hs. rewrite E, <- app_assoc. reflexivity.
    + apply IH.
Qed.

Theorem the_oldest_share_the_first_row : forall w, w <> [] ->
  exists x r others rows, by_position w = x :: r /\ compute_rows w = sort_longest (oldest [x] r ++ others) :: rows.
Proof.
  intros w Ne. destruct (by_position w) as [|x r] eqn:B.
  - exfalso. apply Ne, Permutation_nil. rewrite <- B. apply sort_by_perm.
  - destruct (oldest_fill r [x]) as [q [E F]]; [discriminate|].
    unfold compute_rows, fill_rows, line_up. rewrite B. change (oldest [] (x :: r)) with (oldest [x] r). rewrite E, fold_left_app.
    cbn [app fold_left]. change (place [] x) with [[x]]. cbn [app] in F. rewrite F.
    destruct (first_row_grows (sort_longest (skipn (length (x :: q)) (x :: r))) (x :: q) []) as [o [hs G]].
    exists x, r, o, (map sort_longest hs). split; [reflexivity|]. rewrite E. cbn [app] in *. rewrite G. reflexivity.
Qed.

(** ** BUDGET *)

Theorem every_row_fits_the_budget : forall w, Forall (fits_packed budget limits) (compute_rows w).
Proof.
  intros w. apply Forall_map.
  eapply Forall_impl; [|apply (placing_keeps_each (fits_packed budget limits)); [right; assumption|left; simpl; lia|constructor]].
  intros g. unfold fits_packed.
  rewrite (Permutation_length (sort_by_perm _ longer g)), (roomy_perm _ _ (sort_by_perm _ longer g)). auto.
Qed.

(** ** ANY-FIT *)

Lemma roomy_le : forall g h, total g <= total h -> (forall r, used r g <= used r h) ->
  is_roomy budget limits g = false -> is_roomy budget limits h = false.
Proof.
  intros g h T U. unfold is_roomy. rewrite !Bool.andb_false_iff. intros [F|F].
  - left. apply Nat.leb_gt in F. apply Nat.leb_gt. lia.
  - right. destruct (is_within limits h) eqn:Wa; [|reflexivity]. rewrite (is_within_le _ _ _ U Wa) in F. discriminate.
Qed.

Fixpoint apart (gs : list group) : Prop :=
  match gs with [] => True | g :: r => Forall (fun h => is_roomy budget limits (g ++ h) = false) r /\ apart r end.

Lemma apart_app : forall gs hs, apart (gs ++ hs) <->
  apart gs /\ apart hs /\ Forall (fun g => Forall (fun h => is_roomy budget limits (g ++ h) = false) hs) gs.
Proof.
  induction gs as [|g gs IH]; intros hs; simpl; [intuition|]. rewrite Forall_app, IH, Forall_cons_iff. tauto.
Qed.

Lemma fold_place_apart : forall l gs, apart gs -> apart (fold_left place l gs).
Proof.
  assert (More : forall x g h, is_roomy budget limits (g ++ h) = false ->
    is_roomy budget limits (g ++ h ++ [x]) = false /\ is_roomy budget limits ((g ++ [x]) ++ h) = false).
  { intros x g h. split; revert H; apply roomy_le; intros; rewrite ?sum_over_app; lia. }
  apply placing_keeps; intros x.
  - intros a g b _ A. apply apart_app in A as [A [[B C] D]]. apply apart_app. split; [exact A|]. split; [split; [|exact C]|].
    + eapply Forall_impl; [|exact B]. intros h. apply More.
    + eapply Forall_impl; [|exact D]. intros h F. inversion F; subst. constructor; [apply More; assumption|assumption].
  - intros gs F A. apply apart_app. split; [exact A|]. split; [simpl; auto|]. eapply Forall_impl; [|exact F]. auto.
Qed.

Lemma apart_nth : forall gs i j d, apart gs -> i < j -> j < length gs ->
  is_roomy budget limits (nth i gs d ++ nth j gs d) = false.
Proof.
  induction gs as [|g gs IH]; simpl; intros i j d H I J; [lia|]. destruct H as [F A]. destruct j as [|j]; [lia|]. destruct i as [|i].
  - rewrite Forall_forall in F. apply F, nth_In. lia.
  - apply IH; [exact A|lia|lia].
Qed.

Theorem no_two_rows_of_a_window_fit_together : forall w i j, i < j -> j < length (compute_rows w) ->
  is_roomy budget limits (nth i (compute_rows w) [] ++ nth j (compute_rows w) []) = false.
Proof.
  intros w i j I J. unfold compute_rows in *. rewrite map_length in J. change (@nil sample) with (sort_longest []). rewrite !map_nth.
  rewrite (roomy_perm _ (nth i (fill_rows w) [] ++ nth j (fill_rows w) [])) by (apply Permutation_app; apply sort_by_perm).
  apply apart_nth; [|exact I|exact J]. apply fold_place_apart. exact Logic.I.
Qed.

End Packing.

(** ** Near the fewest: for tokens alone, and no sample longer than the budget (which would be alone in any partition) *)

Lemma apart_total : forall b gs, apart b [] gs -> (length gs - 1) * S b <= 2 * total (concat gs).
Proof.
  intros b. induction gs as [|g gs IH]; [simpl; lia|]. intros A. destruct A as [F A]. specialize (IH A).
  cbn [concat length]. rewrite sum_over_app. destruct (le_lt_dec (S b) (2 * total g)) as [L|L].
  - destruct gs as [|h gs]; [simpl; lia|]. cbn [length] in *. replace (S (S (length gs)) - 1) with (S (length gs)) by lia.
    replace (S (length gs) - 1) with (length gs) in IH by lia. cbn [Nat.mul]. lia.
  - assert (B : length gs * S b <= 2 * total (concat gs)).
    { clear IH A. induction gs as [|h gs IH]; [simpl; lia|]. inversion F as [|? ? F1 F2]; subst. specialize (IH F2).
      cbn [concat length Nat.mul]. rewrite sum_over_app. unfold is_roomy in F1. simpl in F1. rewrite Bool.andb_true_r in F1.
      apply Nat.leb_gt in F1. rewrite sum_over_app in F1. lia. }
    replace (S (length gs) - 1) with (length gs) by lia. lia.
Qed.

Lemma partition_total : forall b P, Forall (fits_packed b []) P -> Forall (fun x => len x <= b) (concat P) ->
  total (concat P) <= length P * b.
Proof.
  intros b. induction P as [|g P IH]; simpl; intros F L; [lia|]. inversion F as [|? ? F1 F2]; subst.
  apply Forall_app in L as [L1 L2]. specialize (IH F2 L2). rewrite sum_over_app.
  assert (total g <= b); [|lia]. destruct F1 as [F1|F1].
  - destruct g as [|x [|y g]]; simpl in *; [lia| |lia]. inversion L1; subst. lia.
  - unfold is_roomy in F1. apply Bool.andb_true_iff in F1 as [F1 _]. apply Nat.leb_le in F1. exact F1.
Qed.

Theorem packing_uses_at_most_twice_the_fewest_rows : forall b w P, Forall (fun x => len x <= b) w ->
  Permutation (concat P) w -> Forall (fits_packed b []) P -> length (compute_rows b [] w) <= 2 * length P.
Proof.
  intros b w P L E F.
  assert (A : apart b [] (fill_rows b [] w)) by (apply fold_place_apart; exact I).
  apply apart_total in A. rewrite <- (sum_over_perm len (sorted_rows_perm (fill_rows b [] w))) in A.
  fold (compute_rows b [] w) in A. rewrite (sum_over_perm len (rows_hold_exactly_the_window b [] w)) in A.
  rewrite <- (map_length sort_longest (fill_rows b [] w)) in A. fold (compute_rows b [] w) in A.
  assert (T : total w <= length P * b).
  { rewrite <- (sum_over_perm len E). apply partition_total; [exact F|].
    eapply Permutation_Forall; [apply Permutation_sym; exact E|exact L]. }
  destruct P as [|g P].
  - simpl in E. apply Permutation_nil in E. subst w. unfold compute_rows. simpl. lia.
  - destruct (le_lt_dec (length (compute_rows b [] w)) (2 * length (g :: P))) as [G|G]; [exact G|exfalso].
    assert (2 * length (g :: P) * S b <= (length (compute_rows b [] w) - 1) * S b) by (apply Nat.mul_le_mono_r; lia).
    cbn [length] in *. nia.
Qed.

(** Best fit may use more rows than needed: under a budget of 8 it packs 4 with 3, then 3 with 2 and 2, and 2 alone. But 4, 2, 2 and
    3, 3, 2 are enough. *)
Definition six : list sample :=
  map (fun '(p, l) => mkSample p p l l []) [(0, 4); (1, 3); (2, 3); (3, 2); (4, 2); (5, 2)].

Theorem packing_may_use_more_rows_than_needed : exists P, Permutation (concat P) six /\ Forall (fits_packed 8 []) P /\
  length P < length (compute_rows 8 [] six).
Proof.
  set (x := mkSample 9 9 9 9 []).
  exists [[nth 0 six x; nth 3 six x; nth 4 six x]; [nth 1 six x; nth 2 six x; nth 5 six x]].
  split; [|split; [repeat constructor; right; reflexivity|vm_compute; lia]].
  change (Permutation (([nth 0 six x] ++ [nth 3 six x; nth 4 six x]) ++ [nth 1 six x; nth 2 six x] ++ [nth 5 six x])
                      (([nth 0 six x] ++ [nth 1 six x; nth 2 six x]) ++ [nth 3 six x; nth 4 six x] ++ [nth 5 six x])).
  rewrite <- !app_assoc. apply Permutation_app_head. rewrite !app_assoc. apply Permutation_app_tail, Permutation_app_comm.
Qed.
