(** Settling, of odb_ref/plan/settling.py: units are moved or exchanged between micro-batches as long as the costlier of the two becomes
    cheaper. It ends, loses nothing, keeps the bounds, and fills empty micro-batches. Spec: R13.5. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Lists Types Alignment.
Import ListNotations.
Arguments Nat.eqb : simpl never.
Arguments Nat.leb : simpl never.
Arguments Nat.ltb : simpl never.

(** ** The model *)

(** A micro-batch: its cost before it holds anything, whether it may give something away, and its units. A unit is a [sample]: [pos] is its
    number, [len] its tokens. *)
Record batch := mkBatch { b_start : nat; b_pending : bool; b_group : group }.

Section Settling.
(** The cost of a unit, whether a micro-batch keeps its bounds, and how many of the cheapest micro-batches are considered for an exchange.
    *)
Variables (cost : sample -> nat) (room : group -> bool) (near : nat).

Notation spent := (sum_over cost).

Definition b_cost (b : batch) : nat := b_start b + spent (b_group b).

(** The first micro-batch with the best [b_cost] among those that are [ok], with its index; the first index is [i]. *)
Fixpoint choose (ok : batch -> bool) (better : nat -> nat -> bool) (i : nat) (bs : list batch) : option (nat * batch) :=
  match bs with
  | [] => None
  | b :: r =>
      match choose ok better (S i) r with
      | Some (j, c) => if ok b && negb (better (b_cost c) (b_cost b)) then Some (i, b) else Some (j, c)
      | None => if ok b then Some (i, b) else None
      end
  end.

(** All ways to take one unit out of a group. *)
Fixpoint takings (g : group) : list (sample * group) :=
  match g with [] => [] | x :: r => (x, r) :: map (fun '(y, s) => (y, x :: s)) (takings r) end.

Fixpoint drop_alike (l : list (sample * group)) : list (sample * group) :=
  match l with
  | [] => []
  | x :: r => match drop_alike r with
      | [] => [x]
      | y :: s => if cost (fst x) =? cost (fst y) then x :: s else x :: y :: s
      end
  end.

(** By rising cost; of units with equal cost only the first counts. *)
Definition kinds (g : group) : list (sample * group) :=
  drop_alike (sort_by (fun x y => (cost (fst x) <? cost (fst y)) || ((cost (fst x) =? cost (fst y)) && (pos (fst x) <=? pos (fst y)))) (takings g)).

(** What may be given in return for a unit: nothing, or a unit of the other micro-batch. *)
Definition returns (swaps : bool) (h : group) : list (list sample * group) :=
  ([], h) :: if swaps then map (fun '(y, s) => ([y], s)) (kinds h) else [].

(** An exchange between [s] and [t], and the cost of the costlier of the two after it. *)
Definition try_exchange (s t : batch) (given : sample * group) (back : list sample * group) : list (nat * (batch * batch)) :=
  let g := fst back ++ snd given in
  let h := fst given :: snd back in
  let after := Nat.max (b_start s + spent g) (b_start t + spent h) in
  if (after <? b_cost s) && negb (length g =? 0) && room h && room g then [(after, (mkBatch (b_start s) true g, mkBatch (b_start t) true h))]
  else [].

Definition exchanges (swaps : bool) (s t : batch) : list (nat * (batch * batch)) :=
  let given := kinds (b_group s) in
  flat_map (fun x => flat_map (try_exchange s t x) (returns swaps (b_group t))) (if swaps then given else firstn 1 given).

Definition cheaper (x y : nat * batch) : bool :=
  (b_cost (snd x) <? b_cost (snd y)) || ((b_cost (snd x) =? b_cost (snd y)) && (fst x <=? fst y)).

Definition cheapest (bs : list batch) : list (nat * batch) := firstn near (sort_by cheaper (combine (seq 0 (length bs)) bs)).

Definition all_exchanges (swaps : bool) (i : nat) (s : batch) (bs : list batch) : list (nat * (nat * (batch * batch))) :=
  flat_map (fun '(j, t) => if j =? i then [] else map (fun '(after, both) => (after, (j, both))) (exchanges swaps s t)) (cheapest bs).

(** The first of the best. *)
Fixpoint best {A : Type} (l : list (nat * A)) : option (nat * A) :=
  match l with
  | [] => None
  | x :: r => match best r with Some y => if fst y <? fst x then Some y else Some x | None => Some x end
  end.

Definition is_even (enough : nat) (bs : list batch) : bool := forallb (fun b => b_cost b <=? enough) bs.

Definition next (bs : list batch) : option (nat * batch) := choose b_pending (fun a b => b <? a) 0 bs.

(** Until no micro-batch may give anything away. If [enough] is given, until none costs more than that, or the next finds no exchange. *)
Fixpoint settle (enough : option nat) (swaps : bool) (fuel : nat) (bs : list batch) : list batch :=
  match fuel with
  | 0 => bs
  | S fuel =>
      if match enough with Some most => is_even most bs | None => false end then bs else
      match next bs with
      | None => bs
      | Some (i, s) =>
          match best (all_exchanges swaps i s bs) with
          | Some (_, (j, (s', t'))) => settle enough swaps fuel (set_nth j t' (set_nth i s' bs))
          | None => match enough with
              | Some _ => bs
              | None => settle enough swaps fuel (set_nth i (mkBatch (b_start s) false (b_group s)) bs)
              end
          end
      end
  end.

(** The measure that falls: the squares of the costs, plus the number of micro-batches that may give something away. *)
Definition weight (b : batch) : nat := b_cost b * b_cost b + if b_pending b then 1 else 0.
Definition measure (bs : list batch) : nat := sum_over weight bs.

Definition settled (enough : option nat) (swaps : bool) (bs : list batch) : list batch := settle enough swaps (measure bs) bs.

(** ** One exchange *)

Lemma set_nth_length : forall (A : Type) i (x : A) l, length (set_nth i x l) = length l.
Proof. induction i as [|i IH]; intros x [|y l]; simpl; congruence. Qed.

Lemma set_nth_forall : forall (A : Type) (P : A -> Prop) i x l, P x -> Forall P l -> Forall P (set_nth i x l).
Proof. intros A P i x l Px F. revert i. induction F as [|y l Py F IH]; intros [|i]; simpl; auto. Qed.

Lemma takings_perm : forall g x r, In (x, r) (takings g) -> Permutation (x :: r) g.
Proof.
  induction g as [|y g IH]; simpl; intros x r; [intros []|]. intros [E|H]; [injection E as -> ->; reflexivity|].
  apply in_map_iff in H. destruct H as [[z s] [E H]]. injection E as -> <-. rewrite perm_swap. constructor. apply IH, H.
Qed.

Lemma drop_alike_in : forall l p, In p (drop_alike l) -> In p l.
Proof.
  induction l as [|x l IH]; simpl; intros p H; [exact H|]. destruct (drop_alike l) as [|y s]; [destruct H as [H|[]]; auto|].
  destruct (_ =? _); simpl in *; destruct H as [H|H]; auto.
Qed.

Lemma kinds_perm : forall g x r, In (x, r) (kinds g) -> Permutation (x :: r) g.
Proof. intros g x r H. apply drop_alike_in in H. eapply takings_perm, Permutation_in; [apply sort_by_perm|exact H]. Qed.

Lemma kinds_some : forall g, g <> [] -> exists p l, kinds g = p :: l.
Proof.
  intros [|x g] Nh; [contradiction|]. unfold kinds. destruct (sort_by _ _) as [|p l] eqn:E.
  - apply (f_equal (@length _)) in E. rewrite sort_by_length in E. discriminate.
  - simpl. destruct (drop_alike l) as [|y s]; [eauto|]. destruct (_ =? _); eauto.
Qed.

Lemma returns_perm : forall swaps h o q, In (o, q) (returns swaps h) -> Permutation (o ++ q) h.
Proof.
  intros swaps h o q [E|H]; [injection E as <- <-; reflexivity|]. destruct swaps; [|easy].
  apply in_map_iff in H. destruct H as [[y s] [E H]]. injection E as <- <-. apply kinds_perm, H.
Qed.

(** How two micro-batches relate to their former selves after an exchange. *)
Record is_exchange (s t s' t' : batch) : Prop := mkExchange {
  starts_stay : b_start s' = b_start s /\ b_start t' = b_start t;
  both_may_give : b_pending s' = true /\ b_pending t' = true;
  units_stay : Permutation (b_group s' ++ b_group t') (b_group s ++ b_group t);
  none_is_empty : b_group s' <> [] /\ b_group t' <> [];
  bounds_hold : room (b_group s') = true /\ room (b_group t') = true;
  both_cost_less : b_cost s' < b_cost s /\ b_cost t' < b_cost s }.

Lemma exchanges_are : forall swaps s t after s' t', In (after, (s', t')) (exchanges swaps s t) -> is_exchange s t s' t'.
Proof.
  intros swaps s t after s' t' H. apply in_flat_map in H. destruct H as [[x r] [Hx H]].
  apply in_flat_map in H. destruct H as [[o q] [Ho H]]. apply returns_perm in Ho.
  assert (Px : Permutation (x :: r) (b_group s)).
  { apply kinds_perm. destruct swaps; [exact Hx|]. destruct (kinds (b_group s)); [easy|]. destruct Hx as [Hx|[]]. left. exact Hx. }
  unfold try_exchange in H. simpl in H. destruct (_ && _) eqn:E; [|easy]. destruct H as [H|[]]. injection H as <- <- <-.
  rewrite !andb_true_iff in E. destruct E as [[[L Nh] Rh] Rg]. apply Nat.ltb_lt in L. split; simpl; auto.
  - rewrite <- Px, <- Ho, <- app_assoc, Permutation_app_swap_app, <- (Permutation_middle o q x), <- Permutation_middle. reflexivity.
  - split; [|discriminate]. intros Z. rewrite Z in Nh. discriminate.
  - unfold b_cost at 1 3. simpl. lia.
Qed.

Lemma cheapest_in : forall bs j t, In (j, t) (cheapest bs) -> nth_error bs j = Some t.
Proof.
  intros bs j t H. apply numbered. eapply Permutation_in; [apply sort_by_perm|].
  rewrite <- (firstn_skipn near). apply in_app_iff. left. exact H.
Qed.

Lemma best_in : forall (A : Type) (l : list (nat * A)) x, best l = Some x -> In x l.
Proof.
  induction l as [|y l IH]; simpl; intros x E; [discriminate|]. destruct (best l) as [z|].
  - destruct (fst z <? fst y); injection E as <-; auto.
  - injection E as <-. auto.
Qed.

Lemma best_none : forall (A : Type) (l : list (nat * A)), best l = None -> l = [].
Proof. intros A [|y l]; simpl; [reflexivity|]. destruct (best l) as [z|]; [destruct (_ <? _)|]; discriminate. Qed.

Lemma found_is : forall swaps i s bs after j s' t', best (all_exchanges swaps i s bs) = Some (after, (j, (s', t'))) ->
  exists t, j <> i /\ nth_error bs j = Some t /\ is_exchange s t s' t'.
Proof.
  intros swaps i s bs after j s' t' E. apply best_in, in_flat_map in E. destruct E as [[k t] [Hk H]].
  destruct (k =? i) eqn:K; [easy|]. apply in_map_iff in H. destruct H as [[a [u v]] [E H]]. injection E as -> -> -> ->.
  exists t. split; [apply Nat.eqb_neq, K|]. split; [apply cheapest_in, Hk|]. apply exchanges_are in H. exact H.
Qed.

Lemma choose_in : forall ok better bs k i b, choose ok better k bs = Some (i, b) ->
  k <= i /\ nth_error bs (i - k) = Some b /\ ok b = true.
Proof.
  induction bs as [|c bs IH]; simpl; intros k i b E; [discriminate|].
  assert (Here : ok c = true -> (k, c) = (i, b) -> k <= i /\ nth_error (c :: bs) (i - k) = Some b /\ ok b = true).
  { intros O H. injection H as -> ->. rewrite Nat.sub_diag. auto. }
  destruct (choose ok better (S k) bs) as [[j d]|] eqn:C.
  - assert (There : (j, d) = (i, b) -> k <= i /\ nth_error (c :: bs) (i - k) = Some b /\ ok b = true).
    { intros H. injection H as -> ->. destruct (IH (S k) i b C) as [L [Nh Ok]]. replace (i - k) with (S (i - S k)) by lia. auto with arith. }
    destruct (ok c); simpl in E; [destruct (negb _)|]; injection E as E1 E2; [apply Here|apply There|apply There]; congruence.
  - destruct (ok c); [|discriminate]. injection E as E1 E2. apply Here; congruence.
Qed.

Lemma choose_none : forall ok better bs k, choose ok better k bs = None -> Forall (fun b => ok b = false) bs.
Proof.
  induction bs as [|c bs IH]; simpl; intros k E; [constructor|]. destruct (choose ok better (S k) bs) as [[j d]|] eqn:C.
  - destruct (ok c && _); discriminate.
  - destruct (ok c) eqn:O; [discriminate|]. constructor; eauto.
Qed.

Lemma next_in : forall bs i s, next bs = Some (i, s) -> nth_error bs i = Some s /\ b_pending s = true.
Proof. intros bs i s E. apply choose_in in E. rewrite Nat.sub_0_r in E. apply E. Qed.

(** ** Settling keeps whatever an exchange keeps *)

Definition quiet (s : batch) : batch := mkBatch (b_start s) false (b_group s).

Lemma settle_keeps : forall (P : list batch -> Prop) enough swaps,
  (forall bs i s, P bs -> nth_error bs i = Some s -> all_exchanges swaps i s bs = [] -> P (set_nth i (quiet s) bs)) ->
  (forall bs i j s t s' t', P bs -> nth_error bs i = Some s -> nth_error (set_nth i s' bs) j = Some t -> In t bs -> is_exchange s t s' t' ->
    P (set_nth j t' (set_nth i s' bs))) ->
  forall fuel bs, P bs -> P (settle enough swaps fuel bs).
Proof.
  intros P enough swaps Q X. induction fuel as [|fuel IH]; intros bs H; [exact H|]. cbn [settle].
  destruct (match enough with Some most => is_even most bs | None => false end); [exact H|].
  destruct (next bs) as [[i s]|] eqn:Nh; [|exact H]. destruct (next_in _ _ _ Nh) as [Ni Ps].
  destruct (best _) as [[after [j [s' t']]]|] eqn:B.
  - destruct (found_is _ _ _ _ _ _ _ _ B) as [t [J [Nj E]]].
    apply IH, (X bs i j s t); auto; [rewrite set_nth_other; auto|exact (nth_error_In _ _ Nj)].
  - destruct enough; [exact H|]. apply IH, Q; auto. apply best_none, B.
Qed.

Lemma settle_keeps_all : forall (P : batch -> Prop) enough swaps, (forall b, P b -> P (quiet b)) ->
  (forall s t s' t', P s -> P t -> is_exchange s t s' t' -> P s' /\ P t') ->
  forall fuel bs, Forall P bs -> Forall P (settle enough swaps fuel bs).
Proof.
  intros P enough swaps Q X fuel bs. apply settle_keeps; clear bs.
  - intros bs i s F Nh _. apply set_nth_forall; auto. apply Q. rewrite Forall_forall in F. eapply F, nth_error_In, Nh.
  - intros bs i j s t s' t' F Nh _ I E. rewrite Forall_forall in F.
    destruct (X s t s' t' (F s (nth_error_In _ _ Nh)) (F t I) E). apply set_nth_forall, set_nth_forall; auto. apply Forall_forall, F.
Qed.

Definition units_in (bs : list batch) : list sample := concat (map b_group bs).

Lemma set_nth_units : forall i x y bs, nth_error bs i = Some y ->
  Permutation (b_group y ++ units_in (set_nth i x bs)) (b_group x ++ units_in bs).
Proof. intros i x y bs Nh. exact (concat_perm _ _ _ (Permutation_map b_group (set_nth_perm _ i x y bs Nh))). Qed.

Lemma settle_length : forall enough swaps fuel bs, length (settle enough swaps fuel bs) = length bs.
Proof. intros enough swaps fuel bs. apply (settle_keeps (fun now => length now = length bs)); intros; rewrite ?set_nth_length; auto. Qed.

Theorem settling_loses_nothing : forall enough swaps fuel bs, Permutation (units_in (settle enough swaps fuel bs)) (units_in bs).
Proof.
  intros enough swaps fuel bs. apply (settle_keeps (fun now => Permutation (units_in now) (units_in bs))); auto.
  - intros now i s L Nh _. rewrite <- L. eapply Permutation_app_inv_l, (set_nth_units i (quiet s) s now Nh).
  - intros now i j s t s' t' L Nh M _ E. rewrite <- L. apply (Permutation_app_inv_l (b_group s ++ b_group t)).
    rewrite <- (units_stay _ _ _ _ E) at 2. rewrite <- !app_assoc, (set_nth_units j t' t _ M), Permutation_app_swap_app.
    rewrite (set_nth_units i s' s now Nh). apply Permutation_app_swap_app.
Qed.

Theorem settling_keeps_the_bounds : forall enough swaps fuel bs, Forall (fun b => room (b_group b) = true) bs ->
  Forall (fun b => room (b_group b) = true) (settle enough swaps fuel bs).
Proof. intros enough swaps. apply settle_keeps_all; auto. intros s t s' t' _ _ E. apply (bounds_hold _ _ _ _ E). Qed.

Theorem settling_leaves_none_empty : forall enough swaps fuel bs, Forall (fun b => b_group b <> []) bs ->
  Forall (fun b => b_group b <> []) (settle enough swaps fuel bs).
Proof. intros enough swaps. apply settle_keeps_all; auto. intros s t s' t' _ _ E. apply (none_is_empty _ _ _ _ E). Qed.

(** ** Settling ends *)

Definition has_ended (enough : option nat) (swaps : bool) (bs : list batch) : Prop :=
  (exists most, enough = Some most /\ (is_even most bs = true \/ exists i s, next bs = Some (i, s) /\ all_exchanges swaps i s bs = [])) \/
  Forall (fun b => b_pending b = false) bs.

Lemma exchange_weighs_less : forall s t s' t', is_exchange s t s' t' -> b_pending s = true -> weight s' + weight t' < weight s + weight t.
Proof.
  intros s t s' t' [[S1 S2] [P1 P2] U _ _ [L1 L2]] P. apply (sum_over_perm cost) in U. rewrite !sum_over_app in U.
  assert (E : b_cost s' + b_cost t' = b_cost s + b_cost t) by (unfold b_cost; lia). unfold weight. rewrite P, P1, P2.
  assert (Sq : b_cost s' * b_cost s' + b_cost t' * b_cost t' + 2 <= b_cost s * b_cost s + b_cost t * b_cost t).
  { assert (Z : exists e f, b_cost s' = b_cost t + S f /\ b_cost s = b_cost t + S f + S e /\ b_cost t' = b_cost t + S e).
    { exists (b_cost s - b_cost s' - 1), (b_cost s' - b_cost t - 1). lia. }
    destruct Z as [e [f [-> [-> ->]]]]. nia. }
  destruct (b_pending t); lia.
Qed.

Theorem settling_ends : forall enough swaps fuel bs, measure bs <= fuel -> has_ended enough swaps (settle enough swaps fuel bs).
Proof.
  intros enough swaps. induction fuel as [|fuel IH]; intros bs M.
  - right. cbn [settle]. apply Forall_forall. intros b I. destruct (b_pending b) eqn:P; [|reflexivity].
    apply in_split in I. destruct I as [l [r ->]]. unfold measure in M. rewrite (sum_over_perm weight (m := b :: l ++ r)) in M
      by (symmetry; apply Permutation_middle). simpl in M. unfold weight in M at 1. rewrite P in M. lia.
  - cbn [settle]. destruct (match enough with Some most => is_even most bs | None => false end) eqn:D.
    { left. destruct enough as [most|]; [|discriminate]. eauto. }
    destruct (next bs) as [[i s]|] eqn:Nh; [|right; eapply choose_none, Nh]. destruct (next_in _ _ _ Nh) as [Ni Ps].
    destruct (best _) as [[after [j [s' t']]]|] eqn:B.
    + destruct (found_is _ _ _ _ _ _ _ _ B) as [t [J [Nj E]]]. apply IH. pose proof (exchange_weighs_less _ _ _ _ E Ps) as W.
      pose proof (sum_over_perm weight (set_nth_perm _ i s' s bs Ni)) as A.
      assert (Nj' : nth_error (set_nth i s' bs) j = Some t) by (rewrite set_nth_other by congruence; exact Nj).
      pose proof (sum_over_perm weight (set_nth_perm _ j t' t _ Nj')) as C. simpl in A, C. unfold measure in *. lia.
    + apply best_none in B. destruct enough as [most|]; [left; eauto 8|]. apply IH.
      pose proof (sum_over_perm weight (set_nth_perm _ i (quiet s) s bs Ni)) as A. simpl in A. unfold measure in *.
      assert (W : weight s = S (weight (quiet s))) by (unfold weight; rewrite Ps; unfold quiet, b_cost; simpl; lia).
      fold (quiet s). lia.
Qed.

(** ** Settling fills empty micro-batches *)

Hypothesis near_some : 1 <= near.
Hypothesis room_part : forall x g, room (x :: g) = true -> room g = true.
Hypothesis room_perm : forall g h, Permutation g h -> room g = room h.

(** A micro-batch that keeps the bounds and begins at cost 0, with units that cost something and fit alone. *)
Definition is_sound (b : batch) : Prop :=
  b_start b = 0 /\ room (b_group b) = true /\ Forall (fun x => 1 <= cost x /\ room [x] = true) (b_group b).

Lemma spent_some : forall b, is_sound b -> b_group b <> [] -> 1 <= b_cost b.
Proof. intros b [_ [_ F]] Nh. unfold b_cost. destruct (b_group b) as [|x g]; [contradiction|]. inversion F; subst. simpl. lia. Qed.

Lemma cheaper_orders : orders cheaper.
Proof. unfold cheaper. orders_numbers. Qed.

(** While some micro-batch is empty, each with two or more units finds an exchange. *)
Lemma an_empty_one_is_filled : forall swaps bs i s, Forall is_sound bs -> nth_error bs i = Some s -> 2 <= length (b_group s) ->
  all_exchanges swaps i s bs = [] -> Forall (fun b => b_group b <> []) bs.
Proof.
  intros swaps bs i s F Ni Two E. apply Forall_forall. intros e Ie Empty. rewrite Forall_forall in F.
  assert (Fs : is_sound s) by (eapply F, nth_error_In, Ni).
  destruct (cheapest bs) as [|[j t] l] eqn:C.
  { unfold cheapest in C. apply (f_equal (@length _)) in C. rewrite firstn_length, sort_by_length, combine_length, seq_length in C.
    destruct bs; [easy|]. simpl in C. lia. }
  assert (It : In (j, t) (cheapest bs)) by (rewrite C; left; reflexivity). apply cheapest_in in It.
  assert (Zt : b_group t = []).
  { assert (L : b_cost t <= b_cost e).
    { apply In_nth_error in Ie. destruct Ie as [k Nk].
      assert (Ik : In (k, e) (sort_by cheaper (combine (seq 0 (length bs)) bs))).
      { eapply Permutation_in; [symmetry; apply sort_by_perm|]. apply numbered, Nk. }
      pose proof (sort_by_sorted _ cheaper (combine (seq 0 (length bs)) bs) cheaper_orders) as S. unfold cheapest in C.
      destruct (sort_by cheaper _) as [|p r]; [easy|]. destruct near as [|n]; [lia|]. simpl in C. injection C as -> _.
      destruct Ik as [Ik|Ik]; [injection Ik as _ <-; lia|]. inversion S as [|? ? _ Fa]. rewrite Forall_forall in Fa. apply Fa in Ik.
      unfold cheaper in Ik. simpl in Ik. rewrite orb_true_iff, andb_true_iff, Nat.ltb_lt, Nat.eqb_eq in Ik. lia. }
    destruct (b_group t) eqn:G; [reflexivity|]. assert (1 <= b_cost t) by (apply spent_some; [eapply F, nth_error_In, It|congruence]).
    destruct (F e Ie) as [Z _]. unfold b_cost in L at 2. rewrite Empty, Z in L. simpl in L. lia. }
  assert (J : j <> i) by (intros ->; rewrite It in Ni; injection Ni as ->; rewrite Zt in Two; simpl in Two; lia).
  destruct (kinds_some (b_group s)) as [[x r] [k K]]; [intros Z; rewrite Z in Two; simpl in Two; lia|].
  assert (P : Permutation (x :: r) (b_group s)) by (apply kinds_perm; rewrite K; left; reflexivity).
  assert (In (Nat.max (b_start s + spent r) (b_start t + (cost x + 0)), (mkBatch (b_start s) true r, mkBatch (b_start t) true [x])) (exchanges swaps s t)).
  { apply in_flat_map. exists (x, r). split; [rewrite K; destruct swaps; left; reflexivity|].
    apply in_flat_map. exists ([], []). split; [left; rewrite Zt; reflexivity|]. unfold try_exchange. simpl.
    destruct Fs as [S0 [Rs Fx]]. destruct (F t (nth_error_In _ _ It)) as [T0 _]. pose proof (Forall_perm _ _ _ _ (Permutation_sym P) Fx) as Fx'.
    inversion Fx' as [|? ? [Cx Rx] Fr]; subst. pose proof (Permutation_length P) as Len. simpl in Len.
    destruct r as [|y r']; [simpl in Len; lia|]. inversion Fr as [|? ? [Cy _] _]; subst.
    rewrite (proj2 (Nat.ltb_lt _ _)); [|unfold b_cost; rewrite <- (sum_over_perm cost P), S0, T0; simpl; lia]. rewrite Rx.
    rewrite (room_part x); [left; reflexivity|]. rewrite (room_perm _ _ P). exact Rs. }
  assert (In (j, t) (cheapest bs)) as Ic by (rewrite C; left; reflexivity).
  assert (X : In (Nat.max (b_start s + spent r) (b_start t + (cost x + 0)), (j, (mkBatch (b_start s) true r, mkBatch (b_start t) true [x]))) (all_exchanges swaps i s bs)).
  { apply in_flat_map. exists (j, t). split; [exact Ic|]. rewrite (proj2 (Nat.eqb_neq _ _) J).
    apply in_map_iff. eexists. split; [|eassumption]. reflexivity. }
  rewrite E in X. exact X.
Qed.

Lemma exchange_sound : forall s t s' t', is_sound s -> is_sound t -> is_exchange s t s' t' -> is_sound s' /\ is_sound t'.
Proof.
  intros s t s' t' [Ss [_ Fs]] [St [_ Ft]] [[S1 S2] _ U _ [R1 R2] _].
  assert (G : Forall (fun x => 1 <= cost x /\ room [x] = true) (b_group s' ++ b_group t')).
  { eapply Forall_perm; [symmetry; exact U|]. apply Forall_app. auto. }
  apply Forall_app in G. unfold is_sound. intuition congruence.
Qed.

(** If all begin at cost 0 and may give, then one stays empty only if none has two units. *)
Theorem settling_fills_what_is_empty : forall swaps bs, Forall is_sound bs -> Forall (fun b => b_pending b = true) bs ->
  let found := settled None swaps bs in Forall (fun b => b_group b <> []) found \/ Forall (fun b => length (b_group b) <= 1) found.
Proof.
  intros swaps bs So Pe. unfold settled.
  pose (P now := Forall is_sound now /\
    (Forall (fun b => b_group b <> []) now \/ Forall (fun b => b_pending b = true \/ length (b_group b) <= 1) now)).
  assert (K : P (settle None swaps (measure bs) bs)).
  { apply settle_keeps; unfold P.
    - intros now i s [F H] Nh E. assert (Ss : is_sound s) by (rewrite Forall_forall in F; eapply F, nth_error_In, Nh).
      split; [apply set_nth_forall; auto|]. destruct (le_gt_dec 2 (length (b_group s))) as [Two|Few].
      + left. pose proof (an_empty_one_is_filled swaps now i s F Nh Two E) as A. apply set_nth_forall; [|exact A].
        rewrite Forall_forall in A. apply (A s), (nth_error_In _ _ Nh).
      + destruct H as [H|H]; [left|right]; apply set_nth_forall; auto; [|simpl; lia].
        rewrite Forall_forall in H. apply (H s), (nth_error_In _ _ Nh).
    - intros now i j s t s' t' [F H] Nh M I E. split.
      + rewrite Forall_forall in F. destruct (exchange_sound s t s' t' (F s (nth_error_In _ _ Nh)) (F t I) E).
        apply set_nth_forall, set_nth_forall; auto. apply Forall_forall, F.
      + destruct (none_is_empty _ _ _ _ E), (both_may_give _ _ _ _ E).
        destruct H as [H|H]; [left|right]; apply set_nth_forall, set_nth_forall; auto.
    - split; [exact So|]. right. eapply Forall_impl; [|exact Pe]. auto. }
  destruct K as [_ [K|K]]; [auto|right].
  destruct (settling_ends None swaps (measure bs) bs (le_n _)) as [[most [E _]]|Q]; [discriminate|].
  rewrite Forall_forall in *. intros b I. destruct (K b I) as [B|B]; [|exact B]. rewrite (Q b I) in B. discriminate.
Qed.
End Settling.
