(** R13 for packed micro-batches: `plan_all` and `plan_ranks` of odb_ref/plan/planning.py, from the samples to the micro-batches of each rank.
    Spec: R13.1 to R13.8. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Types Alignment Packing Layouts PlanSettling PlanDivision.
Import ListNotations.

(** ** The model *)

(** What all ranks plan by; [t_of] is what a sample of so many tokens costs. *)
Record terms := mkTerms {
  t_budget : nat; t_limits : list nat; t_of : nat -> nat; t_multiple : nat; t_at_least : nat; t_at_most : option nat;
  t_is_alone : bool; t_is_idle : bool; t_is_at_ends : bool;
  t_near : nat; t_far : nat; t_exchanged : nat; t_tried : nat }.

(** Samples of one key, in the order of their first. *)
Fixpoint join_one (key : sample -> nat) (gs : list group) (x : sample) : list group :=
  match gs with
  | [] => [[x]]
  | g :: r => if key (hd x g) =? key x then (g ++ [x]) :: r else g :: join_one key r x
  end.

Definition join (key : sample -> nat) (l : list sample) : list group := fold_left (join_one key) l [].

Section Plan.
Variable T : terms.

Notation limits := (t_limits T).

(** Samples as one unit of number [n]: what it costs stands behind what it uses of each limit. *)
Definition unit_of (n : nat) (g : group) : sample :=
  mkSample n n (total g) 0 (map (fun r => used r g) (seq 0 (length limits)) ++ [row_cost (t_of T) g]).

Definition unit_cost (u : sample) : nat := nth (length limits) (costs u) 0.

Definition units_of (gs : list group) : list sample := map (fun '(n, g) => unit_of n g) (combine (seq 0 (length gs)) gs).

(** The samples of a micro-batch of units. *)
Definition members (gs : list group) (b : group) : group := by_position (concat (map (fun u => nth (pos u) gs []) b)).

Definition fewest_of (units : list sample) (ranks : nat) : list group :=
  find_fewest unit_cost (t_budget T) limits (t_far T) (t_exchanged T) (t_tried T)
    (others (t_budget T) limits units) (length (loners (t_budget T) limits units)) (t_multiple T * ranks) (t_at_least T * ranks).

Definition need_of (units : list sample) (ranks : nat) : nat :=
  length (loners (t_budget T) limits units) + length (fewest_of units ranks).

Definition divide_into (units : list sample) (count ranks : nat) : list group :=
  divide unit_cost (t_budget T) limits (t_near T) (t_far T) (t_exchanged T) units (fewest_of units ranks) count ranks.

Definition round_up (n : nat) : nat := ceil (Nat.max n (t_at_least T)) (t_multiple T) * t_multiple T.

(** A micro-batch that is too large, too many of them, or, for ranks that may not be idle, too few units. *)
Definition is_refused (units : list sample) : bool := negb (t_is_alone T) && existsb (fun x => negb (is_roomy (t_budget T) limits [x])) units.

Definition is_count_refused (count : nat) (rows : list (list group)) : bool :=
  match t_at_most T with Some most => most <? count | None => false end ||
  negb (t_is_idle T) && existsb (fun row => length (concat row) <? count) rows.

(** By falling cost: as they are, or the costliest in the middle. *)
Fixpoint odds {A : Type} (l : list A) : list A := match l with [] => [] | x :: r => x :: match r with [] => [] | _ :: s => odds s end end.

Definition arrange {A : Type} (l : list A) : list A := if t_is_at_ends T then rev (odds l) ++ odds (tl l) else l.

Definition finish (shares : list (list group)) (rows : list (list group)) : list (list group) :=
  map (fun '(gs, row) => map (members gs) (arrange row)) (combine shares rows).

(** Of each rank's own units, given by their samples. *)
Definition plan_shares (shares : list (list group)) : option (list (list group)) :=
  let units := map units_of shares in
  let count := round_up (fold_left Nat.max (map (fun u => need_of u 1) units) 0) in
  let rows := map (fun u => divide_into u count 1) units in
  if existsb is_refused units || is_count_refused count rows then None else Some (finish shares rows).

(** Of a step the costliest goes to the rank that has had least. *)
Definition has_less (x y : nat * list group) : bool :=
  let a := sum_over (spent unit_cost) (snd x) in let b := sum_over (spent unit_cost) (snd y) in
  (a <? b) || ((a =? b) && (fst x <=? fst y)).

Fixpoint deal (ranks count : nat) (bs : list group) (rows : list (nat * list group)) : list (nat * list group) :=
  match count with
  | 0 => rows
  | S n => deal ranks n (skipn ranks bs) (map (fun '((r, row), b) => (r, row ++ [b])) (combine (sort_by has_less rows) (firstn ranks bs)))
  end.

Definition deal_out (ranks count : nat) (bs : list group) : list (list group) :=
  map snd (sort_by (fun x y => fst x <=? fst y) (deal ranks count bs (combine (seq 0 ranks) (repeat [] ranks)))).

(** Of units dealt out to [ranks]. *)
Definition plan_dealt (gs : list group) (ranks : nat) : option (list (list group)) :=
  let units := units_of gs in
  let count := round_up (ceil (need_of units ranks) ranks) in
  let rows := deal_out ranks count (divide_into units (count * ranks) ranks) in
  if is_refused units || is_count_refused count rows then None else Some (finish (repeat gs ranks) rows).

(** Keys dealt out to ranks whole, the costliest first, to the rank that has least. *)
Definition homes (keys : list group) (ranks : nat) : list group :=
  let order := sort_by (fun x y => (unit_cost y <? unit_cost x) || ((unit_cost x =? unit_cost y) && (pos x <=? pos y))) (units_of keys) in
  match spread unit_cost (fun _ => true) order (empty_batches (repeat 0 ranks)) with
  | Some bs => map (fun b => members keys (b_group b)) bs
  | None => []
  end.
End Plan.

(** What is planned: samples of ranks, samples dealt out, or keys dealt out. *)
Inductive problem := Stay (own : list (list sample)) | Dealt (all : list sample) (ranks : nat) | Homes (all : list sample) (ranks : nat).

Definition plan_of (T : terms) (key : sample -> nat) (p : problem) : option (list (list group)) :=
  match p with
  | Stay own => plan_shares T (map (join key) own)
  | Dealt all ranks => plan_dealt T (join key all) ranks
  | Homes all ranks => plan_shares T (map (join pos) (homes T (join key all) ranks))
  end.

(** ** What every plan keeps *)

(** Something must be cheap; a sample has a token, and what has a token costs something. *)
Definition terms_ok (T : terms) : Prop := 1 <= t_near T /\ 1 <= t_multiple T /\ forall n, 1 <= n -> 1 <= t_of T n.

Definition samples_ok (l : list sample) : Prop := Forall (fun x => 1 <= len x) l.

(** Samples that share a micro-batch: some, each of which has a token. *)
Definition groups_ok (gs : list group) : Prop := Forall (fun g => g <> [] /\ samples_ok g) gs.

Lemma arrange_perm : forall T (A : Type) (l : list A), Permutation (arrange T l) l.
Proof.
  intros T A l. unfold arrange. destruct (t_is_at_ends T); [|reflexivity]. rewrite <- Permutation_rev.
  assert (E : forall (x : A) r, odds (x :: r) = x :: odds (tl r)) by (intros x [|y r]; reflexivity).
  induction l as [|x l IH]; [constructor|]. rewrite E. simpl. constructor. rewrite Permutation_app_comm. exact IH.
Qed.

Section Kept.
Variable T : terms.
Hypothesis ok : terms_ok T.

Notation limits := (t_limits T).
Notation room := (is_roomy (t_budget T) limits).

(** The samples of units. *)
Definition expand (gs : list group) (l : list sample) : list sample := concat (map (fun u => nth (pos u) gs []) l).

Lemma units_are : forall gs u, In u (units_of T gs) -> exists g, In g gs /\ nth (pos u) gs [] = g /\ u = unit_of T (pos u) g.
Proof.
  intros gs u I. apply in_map_iff in I. destruct I as [[n g] [<- I]]. apply numbered in I. exists g. split; [eapply nth_error_In, I|].
  split; [apply nth_error_nth, I|reflexivity].
Qed.

Lemma expand_units : forall gs, expand gs (units_of T gs) = concat gs.
Proof.
  intros gs. unfold expand, units_of. rewrite map_map. f_equal.
  cut (forall before, map (fun p => nth (pos (let '(n, g) := p in unit_of T n g)) (before ++ gs) []) (combine (seq (length before) (length gs)) gs) = gs).
  { intros C. exact (C []). }
  induction gs as [|g gs IH]; intros before; simpl; [reflexivity|]. f_equal.
  - rewrite app_nth2, Nat.sub_diag by lia. reflexivity.
  - specialize (IH (before ++ [g])). rewrite app_length, Nat.add_1_r, <- app_assoc in IH. exact IH.
Qed.

Lemma expand_perm : forall gs l m, Permutation l m -> Permutation (expand gs l) (expand gs m).
Proof. intros gs l m P. apply concat_perm, Permutation_map, P. Qed.

Lemma members_perm : forall gs b, Permutation (members gs b) (expand gs b).
Proof. intros gs b. apply sort_by_perm. Qed.

Lemma members_concat : forall gs row, Permutation (concat (map (members gs) row)) (expand gs (concat row)).
Proof.
  intros gs. induction row as [|b row IH]; [constructor|]. unfold expand in *. simpl. rewrite map_app, concat_app, IH, members_perm. reflexivity.
Qed.

Lemma within_alike : forall g h, (forall r, r < length limits -> used r g = used r h) -> is_within limits g = is_within limits h.
Proof.
  intros g h E. unfold is_within. apply eq_true_iff_eq. rewrite !forallb_forall.
  split; intros A [r limit] I; specialize (A _ I); apply in_combine_l, in_seq in I; [rewrite <- E|rewrite E]; auto; lia.
Qed.

(** A micro-batch takes what its units do. *)
Lemma room_of_members : forall gs b, Forall (fun u => In u (units_of T gs)) b -> room (members gs b) = room b.
Proof.
  intros gs b F. rewrite (roomy_perm _ _ _ _ (members_perm gs b)). unfold is_roomy, expand.
  assert (E : total (concat (map (fun u => nth (pos u) gs []) b)) = total b /\
    forall r, r < length limits -> used r (concat (map (fun u => nth (pos u) gs []) b)) = used r b).
  { induction F as [|u b I F [IT IU]]; simpl; [auto|]. destruct (units_are gs u I) as [g [_ [Nh U]]]. rewrite Nh, U. simpl. split.
    - rewrite total_app. lia.
    - intros r L. rewrite used_app, (IU r L). f_equal. rewrite app_nth1 by (rewrite map_length, seq_length; exact L).
      rewrite nth_indep with (d' := used 0 g) by (rewrite map_length, seq_length; exact L).
      rewrite (map_nth (fun r => used r g)), seq_nth by exact L. reflexivity. }
  destruct E as [-> E]. f_equal. apply within_alike, E.
Qed.

Lemma a_unit_is_in_its_batch : forall gs bs k, Permutation (concat bs) (units_of T gs) -> In k gs -> exists b, In b bs /\ incl k (members gs b).
Proof.
  intros gs bs k P I. assert (U : exists u, In u (units_of T gs) /\ nth (pos u) gs [] = k).
  { apply In_nth_error in I. destruct I as [n Nh]. exists (unit_of T n k). split; [|apply nth_error_nth, Nh].
    apply in_map_iff. exists (n, k). split; [reflexivity|apply numbered, Nh]. }
  destruct U as [u [Iu Nh]]. apply (Permutation_in _ (Permutation_sym P)), in_concat in Iu. destruct Iu as [b [Ib Iu]]. exists b. split; [exact Ib|].
  intros x Ix. eapply Permutation_in; [symmetry; apply members_perm|]. apply in_concat. exists k. split; [|exact Ix]. rewrite <- Nh.
  apply (in_map (fun v => nth (pos v) gs [])), Iu.
Qed.

Lemma units_cost : forall gs, groups_ok gs -> Forall (fun u => 1 <= unit_cost T u) (units_of T gs).
Proof.
  intros gs G. apply Forall_forall. intros u I. destruct (units_are gs u I) as [g [Ig [_ U]]]. rewrite U. unfold unit_cost. simpl.
  rewrite app_nth2; rewrite map_length, seq_length; [|lia]. rewrite Nat.sub_diag. simpl.
  unfold groups_ok in G. rewrite Forall_forall in G. destruct (G g Ig) as [Nh S]. destruct g as [|x g]; [contradiction|]. inversion S; subst.
  destruct ok as [_ [_ C]]. simpl. pose proof (C (len x)). lia.
Qed.

(** A micro-batch of a plan of units [gs]: within the budget and the limits, or, where that is said, a unit too large for them by itself. *)
Definition batch_ok (gs : list group) (g : group) : Prop :=
  room g = true \/ t_is_alone T = true /\ room g = false /\ exists k, In k gs /\ Permutation g k.

Definition is_single (gs : list group) (g : group) : Prop := g = [] \/ exists k, In k gs /\ Permutation g k.

(** What a rank is given of units [gs]: so many micro-batches, each right, and an empty one only where none has two units. *)
Definition row_ok (count : nat) (gs : list group) (row : list group) : Prop :=
  length row = count /\ Forall (batch_ok gs) row /\ (In [] row -> Forall (is_single gs) row).

Definition row_of (gs : list group) (row : list group) : list group := map (members gs) (arrange T row).

Lemma finished_row : forall count gs row, groups_ok gs -> is_refused T (units_of T gs) = false -> length row = count ->
  Forall (Forall (fun u => In u (units_of T gs))) row ->
  Forall (fun b => room b = true \/ exists x, b = [x] /\ room [x] = false) row ->
  (In [] row -> Forall (fun b => length b <= 1) row) ->
  row_ok count gs (row_of gs row).
Proof.
  intros count gs row G R L U B E. pose proof (arrange_perm T _ row) as P. unfold row_of.
  assert (One : forall u, In u (units_of T gs) -> exists k, In k gs /\ Permutation (members gs [u]) k).
  { intros u I. destruct (units_are gs u I) as [g [Ig [Nh _]]]. exists g. split; [exact Ig|]. rewrite members_perm. unfold expand. simpl.
    rewrite Nh, app_nil_r. reflexivity. }
  rewrite Forall_forall in U. split; [rewrite map_length, (Permutation_length P); exact L|]. split.
  - apply Forall_map. eapply Forall_perm; [symmetry; exact P|]. rewrite Forall_forall in *. intros b I. unfold batch_ok.
    rewrite (room_of_members gs b (U b I)). destruct (B b I) as [H|[x [-> H]]]; [auto|right].
    assert (Iu : In x (units_of T gs)) by (specialize (U _ I); inversion U; assumption).
    unfold is_refused in R. apply andb_false_iff in R. destruct R as [R|R].
    + split; [destruct (t_is_alone T); [reflexivity|discriminate]|]. auto.
    + exfalso. apply Bool.not_true_iff_false in R. apply R, existsb_exists. exists x. rewrite H. auto.
  - intros I. apply in_map_iff in I. destruct I as [b [Z I]]. apply (Permutation_in _ P) in I.
    assert (b = []).
    { destruct b as [|u b]; [reflexivity|]. exfalso. specialize (U _ I). inversion U as [|? ? Iu _]. destruct (units_are gs u Iu) as [g [Ig [Nh _]]].
      unfold groups_ok in G. rewrite Forall_forall in G. destruct (G g Ig) as [Ne _]. apply Ne.
      pose proof (members_perm gs (u :: b)) as M. rewrite Z in M. unfold expand in M. simpl in M. rewrite Nh in M.
      apply Permutation_nil in M. destruct g; [reflexivity|discriminate]. }
    subst b. specialize (E I). apply Forall_map. eapply Forall_perm; [symmetry; exact P|]. rewrite Forall_forall in *. intros c Ic.
    specialize (E c Ic). destruct c as [|u [|v c]]; [left; reflexivity|right|simpl in E; lia]. apply One. specialize (U _ Ic). inversion U. assumption.
Qed.

Definition count_ok (count : nat) : Prop :=
  (exists k, count = k * t_multiple T) /\ t_at_least T <= count /\ (forall most, t_at_most T = Some most -> count <= most).

Lemma ceil_enough : forall n d, 1 <= d -> n <= ceil n d * d.
Proof.
  intros n d D. unfold ceil. pose proof (Nat.div_mod_eq (n + d - 1) d) as E. pose proof (Nat.mod_upper_bound (n + d - 1) d ltac:(lia)). lia.
Qed.

Lemma round_up_ok : forall n, n <= round_up T n /\ (exists k, round_up T n = k * t_multiple T) /\ t_at_least T <= round_up T n.
Proof.
  intros n. destruct ok as [_ [M _]]. unfold round_up. pose proof (ceil_enough (Nat.max n (t_at_least T)) (t_multiple T) M).
  split; [lia|]. split; [eauto|lia].
Qed.

Lemma count_checked : forall n rows, is_count_refused T (round_up T n) rows = false -> count_ok (round_up T n).
Proof.
  intros n rows R. destruct (round_up_ok n) as [_ [K L]]. split; [exact K|]. split; [exact L|]. intros most E. unfold is_count_refused in R.
  rewrite E in R. apply orb_false_iff in R. destruct R as [R _]. apply Nat.ltb_ge in R. exact R.
Qed.

(** The units of a division, in whatever number of micro-batches there is need of. *)
Lemma divided : forall gs steps ranks, groups_ok gs -> 1 <= ranks -> need_of T (units_of T gs) ranks <= steps * ranks ->
  let bs := divide_into T (units_of T gs) (steps * ranks) ranks in
  Permutation (concat bs) (units_of T gs) /\ Forall (fun b => room b = true \/ exists x, b = [x] /\ room [x] = false) bs /\
  length bs = steps * ranks /\ is_filled_up bs.
Proof.
  intros gs steps ranks G R Nh. apply a_division_is_right; auto; [apply ok|apply units_cost, G|].
  apply the_fewest_hold_exactly_the_units. apply Forall_forall. intros x I. apply filter_In in I. apply I.
Qed.

Lemma of_units : forall gs bs, Permutation (concat bs) (units_of T gs) -> Forall (Forall (fun u => In u (units_of T gs))) bs.
Proof.
  intros gs bs P. apply Forall_forall. intros b I. apply Forall_forall. intros u Iu. eapply Permutation_in; [exact P|]. apply in_concat. eauto.
Qed.

Lemma filled_up_in : forall row bs, (forall b, In b row -> In b bs) -> is_filled_up bs -> In [] row -> Forall (fun b => length b <= 1) row.
Proof.
  intros row bs S [F|F] I; rewrite Forall_forall in *; [exfalso; apply (F []); auto|]. intros b Ib. apply F, S, Ib.
Qed.

(** Each unit is in one micro-batch. *)
Definition shares_batches (gs : list group) (gs' : list group) : Prop := forall k, In k gs -> exists g, In g gs' /\ incl k g.

Lemma unit_shares : forall gs bs, Permutation (concat bs) (units_of T gs) -> shares_batches gs (map (members gs) bs).
Proof.
  intros gs bs P k I. destruct (a_unit_is_in_its_batch gs bs k P I) as [b [Ib S]]. exists (members gs b). split; [apply in_map, Ib|exact S].
Qed.

(** Of each rank's own units. *)
Theorem a_plan_of_ranks_is_right : forall shares rows, Forall groups_ok shares -> plan_shares T shares = Some rows ->
  exists count, count_ok count /\
    Forall2 (fun gs row => Permutation (concat row) (concat gs) /\ row_ok count gs row /\ shares_batches gs row) shares rows.
Proof.
  intros shares rows G E. unfold plan_shares in E. set (count := round_up T _) in E. destruct (_ || _) eqn:X; [discriminate|]. injection E as <-.
  apply orb_false_iff in X. destruct X as [X Y]. exists count. split; [exact (count_checked _ _ Y)|].
  assert (Nh : forall gs, In gs shares -> need_of T (units_of T gs) 1 <= count).
  { intros gs I. unfold count. eapply Nat.le_trans; [|exact (proj1 (round_up_ok _))].
    apply (in_map (units_of T)), (in_map (fun u => need_of T u 1)) in I. revert I. generalize (map (fun u => need_of T u 1) (map (units_of T) shares)).
    generalize (need_of T (units_of T gs) 1). clear. intros n l. generalize 0.
    induction l as [|m l IH]; simpl; intros a [].
    - subst m. assert (forall k b, b <= fold_left Nat.max k b) as M by (induction k as [|c k IHk]; simpl; intros b; [lia|]; specialize (IHk (Nat.max b c)); lia).
      eapply Nat.le_trans; [apply Nat.le_max_r|apply M].
    - apply IH. assumption. }
  assert (F : Forall (fun gs => is_refused T (units_of T gs) = false) shares).
  { apply Forall_forall. intros gs I. destruct (is_refused T (units_of T gs)) eqn:Z; [|reflexivity]. exfalso.
    apply Bool.not_true_iff_false in X. apply X, existsb_exists. exists (units_of T gs). split; [apply in_map, I|exact Z]. }
  clear X Y. clearbody count. unfold finish. rewrite map_map. induction shares as [|gs shares IH]; simpl; [constructor|].
  inversion G as [|? ? Gg Gs]; subst. inversion F as [|? ? Fg Fs]; subst. constructor; [|apply IH; auto; intros k I; apply Nh; simpl; auto].
  destruct (divided gs count 1 Gg (le_n _)) as [P [B [L E]]]; [rewrite Nat.mul_1_r; apply Nh; left; reflexivity|].
  rewrite Nat.mul_1_r in *. change (map (members gs) (arrange T ?r)) with (row_of gs r). split; [|split].
  - unfold row_of. rewrite members_concat, (expand_perm gs _ _ (concat_perm _ _ _ (arrange_perm T _ _))), (expand_perm gs _ _ P), expand_units. reflexivity.
  - apply finished_row; auto; [apply of_units, P|]. apply (filled_up_in _ _ (fun b I => I) E).
  - apply unit_shares. rewrite (concat_perm _ _ _ (arrange_perm T _ _)). exact P.
Qed.

(** ** Dealing out *)

Lemma deal_step : forall (sorted : list (nat * list group)) F, length sorted = length F ->
  let new := map (fun '((r, row), b) => (r, row ++ [b])) (combine sorted F) in
  Permutation (concat (map snd new)) (concat (map snd sorted) ++ F) /\
  map (fun x => length (snd x)) new = map (fun x => S (length (snd x))) sorted.
Proof.
  induction sorted as [|[r row] sorted IH]; intros [|b F] L; simpl in *; try discriminate; [auto|]. destruct (IH F) as [P R]; [congruence|].
  rewrite R. split; [|rewrite app_length, Nat.add_1_r; reflexivity].
  rewrite P, <- !app_assoc. apply Permutation_app_head. simpl. apply Permutation_middle.
Qed.

Lemma deal_is : forall ranks count bs rows k, length bs = count * ranks -> length rows = ranks ->
  Forall (fun x => length (snd x) = k) rows -> let new := deal T ranks count bs rows in
  Permutation (concat (map snd new)) (concat (map snd rows) ++ bs) /\ length new = ranks /\ Forall (fun x => length (snd x) = k + count) new.
Proof.
  intros ranks. induction count as [|count IH]; intros bs rows k L R F; simpl.
  - destruct bs; [|discriminate]. rewrite app_nil_r, Nat.add_0_r. auto.
  - set (sorted := sort_by (has_less T) rows). simpl in L.
    assert (LF : length (firstn ranks bs) = ranks) by (rewrite firstn_length; lia).
    assert (LS : length sorted = ranks) by (unfold sorted; rewrite sort_by_length; exact R).
    destruct (deal_step sorted (firstn ranks bs)) as [P H]; [congruence|].
    destruct (IH (skipn ranks bs) (map (fun '((r, row), b) => (r, row ++ [b])) (combine sorted (firstn ranks bs))) (1 + k)) as [P' [L' F']].
    + rewrite skipn_length. lia.
    + rewrite map_length, combine_length. lia.
    + apply (Forall_map (fun x => length (snd x)) (fun n => n = 1 + k)). rewrite H. apply Forall_map.
      apply sort_by_forall. eapply Forall_impl; [|exact F]. simpl. congruence.
    + split; [|split; [exact L'|eapply Forall_impl; [|exact F']; simpl; lia]].
      rewrite P', P, <- app_assoc, firstn_skipn. apply Permutation_app_tail, concat_perm, Permutation_map, sort_by_perm.
Qed.

Lemma deal_out_is : forall ranks count bs, length bs = count * ranks -> let rows := deal_out T ranks count bs in
  Permutation (concat rows) bs /\ length rows = ranks /\ Forall (fun row => length row = count) rows.
Proof.
  intros ranks count bs L rows. unfold rows, deal_out.
  destruct (deal_is ranks count bs (combine (seq 0 ranks) (repeat [] ranks)) 0 L) as [P [R F]].
  - rewrite combine_length, seq_length, repeat_length. lia.
  - apply Forall_forall. intros [r row] I. apply in_combine_r, repeat_spec in I. subst row. reflexivity.
  - split; [|split; [rewrite map_length, sort_by_length; exact R|apply Forall_map, sort_by_forall, F]].
    rewrite (concat_perm _ _ _ (Permutation_map snd (sort_by_perm _ _ _))), P.
    replace (concat (map snd (combine (seq 0 ranks) (repeat [] ranks)))) with (@nil group); [reflexivity|].
    generalize 0. clear. induction ranks as [|n IH]; intros k; simpl; [reflexivity|apply IH].
Qed.

Theorem a_plan_that_is_dealt_is_right : forall gs ranks rows, groups_ok gs -> 1 <= ranks -> plan_dealt T gs ranks = Some rows ->
  Permutation (concat (concat rows)) (concat gs) /\ length rows = ranks /\ (exists count, count_ok count /\ Forall (row_ok count gs) rows) /\
  shares_batches gs (concat rows).
Proof.
  intros gs ranks rows G R E. unfold plan_dealt in E. set (count := round_up T _) in E. destruct (_ || _) eqn:X; [discriminate|]. injection E as <-.
  apply orb_false_iff in X. destruct X as [X Y]. pose proof (count_checked _ _ Y) as K. fold count in K.
  assert (Nh : need_of T (units_of T gs) ranks <= count * ranks).
  { eapply Nat.le_trans; [apply (ceil_enough _ ranks R)|]. apply Nat.mul_le_mono_r. exact (proj1 (round_up_ok _)). }
  clear Y. clearbody count. destruct (divided gs count ranks G R Nh) as [P [B [L E]]]. set (bs := divide_into T _ _ _) in *.
  destruct (deal_out_is ranks count bs L) as [Q [Lr F]]. set (dealt := deal_out T ranks count bs) in *.
  assert (Z : finish T (repeat gs ranks) dealt = map (row_of gs) dealt).
  { unfold finish. rewrite <- Lr. clear. induction dealt as [|row dealt IH]; simpl; [reflexivity|]. rewrite IH. reflexivity. }
  rewrite Z, map_length. split; [|split; [exact Lr|split; [exists count; split; [exact K|]|]]].
  - transitivity (expand gs (concat (concat dealt))).
    + clear. induction dealt as [|row dealt IH]; simpl; [reflexivity|]. rewrite concat_app, IH. unfold row_of.
      rewrite members_concat, (expand_perm gs _ _ (concat_perm _ _ _ (arrange_perm T _ _))). unfold expand.
      rewrite concat_app, map_app, concat_app. reflexivity.
    + rewrite (expand_perm gs _ _ (concat_perm _ _ _ Q)), (expand_perm gs _ _ P), expand_units. reflexivity.
  - assert (S : forall row b, In row dealt -> In b row -> In b bs).
    { intros row b Ir Ib. eapply Permutation_in; [exact Q|]. apply in_concat. eauto. }
    pose proof (of_units gs bs P) as U. rewrite Forall_forall in F, B, U. apply Forall_map, Forall_forall. intros row I.
    apply finished_row; auto; try (apply Forall_forall; intros b Ib; [exact (U b (S row b I Ib))||exact (B b (S row b I Ib))]).
    apply (filled_up_in row bs (fun b Ib => S row b I Ib) E).
  - intros k I. rewrite <- Q in P. destruct (unit_shares gs (concat dealt) P k I) as [g [Ig Sg]]. exists g. split; [|exact Sg].
    apply in_map_iff in Ig. destruct Ig as [b [<- Ib]]. apply in_concat in Ib. destruct Ib as [row [Ir Ib]]. apply in_concat. exists (row_of gs row).
    split; [apply in_map, Ir|]. apply in_map. eapply Permutation_in; [symmetry; apply arrange_perm|exact Ib].
Qed.

(** Keys that go to ranks whole. *)
Lemma homes_are : forall keys ranks, 1 <= ranks -> length (homes T keys ranks) = ranks /\
  Permutation (concat (homes T keys ranks)) (concat keys) /\ forall k, In k keys -> exists home, In home (homes T keys ranks) /\ incl k home.
Proof.
  intros keys ranks R. unfold homes. set (order := sort_by _ _).
  assert (Found : forall l bs, bs <> [] -> exists new, spread (unit_cost T) (fun _ => true) l bs = Some new).
  { induction l as [|x l IH]; intros bs Nh; simpl; [eauto|]. destruct (choose _ _ _ _ _) as [[i b]|] eqn:C.
    - apply IH. destruct bs; [contradiction|]. destruct i; discriminate.
    - apply choose_none in C. destruct bs; [contradiction|]. inversion C. discriminate. }
  destruct (Found order (empty_batches (repeat 0 ranks))) as [new E]; [destruct ranks; [lia|discriminate]|]. rewrite E.
  apply spread_is in E. destruct E as [L [P _]]. unfold empty_batches in L at 1. rewrite map_length, repeat_length in L.
  rewrite units_in_empty, app_nil_r in P. unfold order in P. rewrite sort_by_perm in P. rewrite <- (map_map b_group (members keys)).
  split; [rewrite !map_length; exact L|]. split.
  - rewrite members_concat, (expand_perm keys _ _ P), expand_units. reflexivity.
  - intros k I. destruct (a_unit_is_in_its_batch keys _ k P I) as [b [Ib S]]. exists (members keys b). split; [apply in_map, Ib|exact S].
Qed.
End Kept.

(** ** Samples of one key *)

Lemma join_one_is : forall key x gs, Permutation (concat (join_one key gs x)) (x :: concat gs) /\
  (Forall (fun g => g <> []) gs -> Forall (fun g => g <> []) (join_one key gs x)).
Proof.
  induction gs as [|g gs [P F]]; simpl; [split; [reflexivity|repeat constructor; discriminate]|]. destruct (_ =? _); simpl.
  - split; [rewrite <- app_assoc; simpl; symmetry; apply Permutation_middle|]. intros Nh. inversion Nh; subst. constructor; [destruct g; discriminate|assumption].
  - split; [rewrite P; symmetry; apply Permutation_middle|]. intros Nh. inversion Nh; subst. constructor; auto.
Qed.

Lemma join_is : forall key l, Permutation (concat (join key l)) l /\ Forall (fun g => g <> []) (join key l).
Proof.
  intros key l. unfold join.
  cut (forall gs, Forall (fun g => g <> []) gs -> Permutation (concat (fold_left (join_one key) l gs)) (l ++ concat gs) /\
    Forall (fun g => g <> []) (fold_left (join_one key) l gs)).
  { intros C. destruct (C [] (Forall_nil _)) as [P F]. rewrite app_nil_r in P. auto. }
  induction l as [|x l IH]; intros gs F; simpl; [auto|]. destruct (join_one_is key x gs) as [P Nh]. destruct (IH _ (Nh F)) as [Q M].
  split; [|exact M]. rewrite Q, P. symmetry. apply Permutation_middle.
Qed.

Lemma join_ok : forall key l, samples_ok l -> groups_ok (join key l).
Proof.
  intros key l S. destruct (join_is key l) as [P F]. unfold groups_ok, samples_ok in *. rewrite Forall_forall in *. intros g I. split; [apply F, I|].
  apply Forall_forall. intros x Ix. apply S. eapply Permutation_in; [exact P|]. apply in_concat. eauto.
Qed.

(** Groups of one key each, no two of the same. *)
Definition keyed (key : sample -> nat) (ks : list nat) (gs : list group) : Prop :=
  NoDup ks /\ Forall2 (fun k g => g <> [] /\ forall x, In x g -> key x = k) ks gs.

Lemma join_one_keyed : forall key x gs ks, keyed key ks gs -> exists ks', keyed key ks' (join_one key gs x) /\ incl ks' (key x :: ks).
Proof.
  intros key x gs ks [Nh F]. induction F as [|k g ks gs [Ne K] F IH].
  - exists [key x]. split; [|apply incl_refl]. split; [repeat constructor; auto|]. repeat constructor; [discriminate|]. intros y [->|[]]. reflexivity.
  - inversion Nh as [|? ? Nk N']; subst. simpl. assert (H : key (hd x g) = k) by (destruct g; [contradiction|apply K; left; reflexivity]). rewrite H.
    destruct (k =? key x) eqn:E.
    + apply Nat.eqb_eq in E. exists (k :: ks). split; [|apply incl_tl, incl_refl]. split; [exact Nh|]. constructor; [|exact F].
      split; [destruct g; discriminate|]. intros y I. apply in_app_iff in I. destruct I as [I|[<-|[]]]; auto.
    + apply Nat.eqb_neq in E. destruct (IH N') as [ks' [[N2 F2] S]]. exists (k :: ks'). split; [split|].
      * constructor; [|exact N2]. intros I. destruct (S k I) as [Z|Z]; [congruence|contradiction].
      * constructor; auto.
      * intros j [<-|I]; [right; left; reflexivity|]. destruct (S j I) as [Z|Z]; simpl; auto.
Qed.

Lemma keyed_together : forall key ks gs x y g h, keyed key ks gs -> In g gs -> In h gs -> In x g -> In y h -> key x = key y -> g = h.
Proof.
  intros key ks gs x y g h [Nh F] G H X Y E.
  assert (K : forall js hs f z, Forall2 (fun k g => g <> [] /\ forall x, In x g -> key x = k) js hs -> In f hs -> In z f -> In (key z) js).
  { intros js hs f z A. induction A as [|j i js hs [_ B] A IH]; intros I Iz; [easy|]. destruct I as [->|I]; [left; symmetry; auto|right; auto]. }
  induction F as [|k i ks gs [_ B] F IH]; [easy|]. inversion Nh as [|? ? Nk N']; subst.
  destruct G as [->|G], H as [->|H]; auto; exfalso; apply Nk.
  - rewrite <- (B x X), E. eapply K; eauto.
  - rewrite <- (B y Y), <- E. eapply K; eauto.
Qed.

Lemma join_together : forall key l x y, In x l -> In y l -> key x = key y -> exists g, In g (join key l) /\ In x g /\ In y g.
Proof.
  intros key l x y X Y E. destruct (join_is key l) as [P _].
  assert (K : exists ks, keyed key ks (join key l)).
  { unfold join. cut (forall gs ks, keyed key ks gs -> exists js, keyed key js (fold_left (join_one key) l gs)).
    - intros C. apply (C [] []). split; constructor.
    - clear. induction l as [|z l IH]; intros gs ks K; simpl; [eauto|]. destruct (join_one_keyed key z gs ks K) as [js [J _]]. eauto. }
  destruct K as [ks K]. apply (Permutation_in _ (Permutation_sym P)), in_concat in X. apply (Permutation_in _ (Permutation_sym P)), in_concat in Y.
  destruct X as [g [G X]], Y as [h [H Y]]. exists g. rewrite (keyed_together key ks _ x y g h K G H X Y E) at 3. auto.
Qed.

(** ** Any problem *)

Definition asked_of (p : problem) : list sample := match p with Stay own => concat own | Dealt all _ | Homes all _ => all end.

Definition ranks_of (p : problem) : nat := match p with Stay own => length own | Dealt _ ranks | Homes _ ranks => ranks end.

Definition problem_ok (p : problem) : Prop := 1 <= ranks_of p /\ samples_ok (asked_of p).

(** What shares a micro-batch. *)
Definition units_in_plan (T : terms) (key : sample -> nat) (p : problem) : list group :=
  match p with
  | Stay own => concat (map (join key) own)
  | Dealt all _ => join key all
  | Homes all ranks => concat (map (join pos) (homes T (join key all) ranks))
  end.

Lemma row_ok_more : forall T count gs hs row, incl gs hs -> row_ok T count gs row -> row_ok T count hs row.
Proof.
  intros T count gs hs row S [L [B E]]. split; [exact L|]. split.
  - eapply Forall_impl; [|exact B]. intros g [R|[A [R [k [I P]]]]]; [left; exact R|right]. eauto 6.
  - intros I. eapply Forall_impl; [|exact (E I)]. intros g [Z|[k [Ik P]]]; [left; exact Z|right]. eauto.
Qed.

Lemma samples_ok_part : forall l m, incl l m -> samples_ok m -> samples_ok l.
Proof. intros l m I S. unfold samples_ok in *. rewrite Forall_forall in *. auto. Qed.

Lemma shares_rows : forall T key own rows, terms_ok T -> samples_ok (concat own) -> plan_shares T (map (join key) own) = Some rows ->
  exists count, count_ok T count /\ Forall (row_ok T count (concat (map (join key) own))) rows /\
    Forall2 (fun mine row => Permutation (concat row) mine /\ shares_batches (join key mine) row) own rows.
Proof.
  intros T key own rows ok S E. destruct (a_plan_of_ranks_is_right T ok (map (join key) own) rows) as [count [K F]]; [|exact E|].
  - apply Forall_map, Forall_forall. intros mine I. apply join_ok, (samples_ok_part _ (concat own)); [|exact S]. intros x Ix. apply in_concat. eauto.
  - exists count. split; [exact K|]. clear E S. remember (map (join key) own) as shares eqn:M. revert own M.
    induction F as [|gs row shares rows [P [R B]] F IH]; intros [|mine own] M; try discriminate; [split; constructor|].
    injection M as -> M. destruct (IH own M) as [A C]. simpl. split.
    + constructor; [eapply row_ok_more; [apply incl_appl, incl_refl|exact R]|].
      eapply Forall_impl; [|exact A]. intros r. apply row_ok_more, incl_appr, incl_refl.
    + constructor; [split; [rewrite P; apply join_is|exact B]|exact C].
Qed.

Lemma rows_concat : forall (R : list sample -> list group -> Prop) own rows, Forall2 (fun mine row => Permutation (concat row) mine /\ R mine row) own rows ->
  Permutation (concat (concat rows)) (concat own) /\ length rows = length own /\ forall mine, In mine own -> exists row, In row rows /\
    Permutation (concat row) mine /\ R mine row.
Proof.
  intros R own rows F. induction F as [|mine row own rows [P H] F [IH [L E]]]; simpl; [split; [auto|split; [auto|easy]]|].
  split; [rewrite concat_app, P, IH; reflexivity|]. split; [auto|]. intros m [<-|I]; [eauto|]. destruct (E m I) as [r [Ir Q]]. eauto.
Qed.

(** A plan has each sample once, and if they stay each rank its own; the same number of micro-batches on each rank, as the terms say; none
    exceeds the budget or a limit but a unit by itself; one is empty only where its rank has none of two units. *)
Theorem a_plan_is_right : forall T key p rows, terms_ok T -> problem_ok p -> plan_of T key p = Some rows ->
  Permutation (concat (concat rows)) (asked_of p) /\ length rows = ranks_of p /\
  (exists count, count_ok T count /\ Forall (row_ok T count (units_in_plan T key p)) rows) /\
  forall own, p = Stay own -> Forall2 (fun mine row => Permutation (concat row) mine) own rows.
Proof.
  intros T key [own|all ranks|all ranks] rows ok [R S] E; simpl in *.
  - destruct (shares_rows T key own rows ok S E) as [count [K [A F]]]. destruct (rows_concat _ own rows F) as [P [L _]].
    split; [exact P|]. split; [exact L|]. split; [eauto|]. intros o Z. injection Z as <-. clear - F. induction F as [|mine row own rows [P _] F IH]; auto.
  - destruct (a_plan_that_is_dealt_is_right T ok _ _ _ (join_ok key all S) R E) as [P [L [C _]]]. rewrite (proj1 (join_is key all)) in P.
    split; [exact P|]. split; [exact L|]. split; [exact C|]. discriminate.
  - destruct (homes_are T (join key all) ranks R) as [H [Q _]]. rewrite (proj1 (join_is key all)) in Q.
    destruct (shares_rows T pos _ rows ok (samples_ok_part _ all (fun x => Permutation_in x Q) S) E) as [count [K [A F]]].
    destruct (rows_concat _ _ rows F) as [P [L _]]. rewrite Q in P. rewrite H in L. split; [exact P|]. split; [exact L|]. split; [eauto|]. discriminate.
Qed.

(** Two samples of one key share a micro-batch, or a rank where keys are dealt out. *)
Theorem a_plan_keeps_keys_together : forall T key p rows x y, terms_ok T -> problem_ok p -> plan_of T key p = Some rows -> key x = key y ->
  match p with
  | Stay own => forall mine, In mine own -> In x mine -> In y mine -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
  | Dealt all _ => In x all -> In y all -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
  | Homes all _ => In x all -> In y all -> exists row, In row rows /\ In x (concat row) /\ In y (concat row)
  end.
Proof.
  intros T key [own|all ranks|all ranks] rows x y ok [R S] E K; simpl in *.
  - intros mine I X Y. destruct (shares_rows T key own rows ok S E) as [_ [_ [_ F]]]. destruct (rows_concat _ own rows F) as [_ [_ C]].
    destruct (C mine I) as [row [Ir [_ B]]]. destruct (join_together key mine x y X Y K) as [k [Ik [Xk Yk]]]. destruct (B k Ik) as [g [Ig G]]. exists row, g. split; [exact Ir|]. split; [exact Ig|]. split; apply G; assumption.
  - intros X Y. destruct (a_plan_that_is_dealt_is_right T ok _ _ _ (join_ok key all S) R E) as [_ [_ [_ B]]].
    destruct (join_together key all x y X Y K) as [k [Ik [Xk Yk]]]. destruct (B k Ik) as [g [Ig G]]. apply in_concat in Ig. destruct Ig as [row [Ir Ig]]. exists row, g. split; [exact Ir|]. split; [exact Ig|]. split; apply G; assumption.
  - intros X Y. destruct (homes_are T (join key all) ranks R) as [_ [Q H]]. rewrite (proj1 (join_is key all)) in Q.
    destruct (shares_rows T pos _ rows ok (samples_ok_part _ all (fun z => Permutation_in z Q) S) E) as [_ [_ [_ F]]].
    destruct (rows_concat _ _ rows F) as [_ [_ C]]. destruct (join_together key all x y X Y K) as [k [Ik [Xk Yk]]].
    destruct (H k Ik) as [home [Ih G]]. destruct (C home Ih) as [row [Ir [P _]]]. exists row. split; [exact Ir|].
    split; (eapply Permutation_in; [symmetry; exact P|]); auto.
Qed.

(** There is a plan but where a unit is too large and may not be alone, there would be too many micro-batches, or a rank may not be idle. *)
Theorem a_plan_is_refused_for_a_reason : forall T key p, plan_of T key p = None ->
  t_is_alone T = false \/ t_at_most T <> None \/ t_is_idle T = false.
Proof.
  intros T key p E. destruct (t_is_alone T) eqn:A; [|auto]. destruct (t_at_most T) eqn:M; [right; left; discriminate|].
  destruct (t_is_idle T) eqn:I; [exfalso|auto].
  assert (Q : forall count rows, is_count_refused T count rows = false) by (intros; unfold is_count_refused; rewrite M, I; reflexivity).
  assert (Nh : forall us, is_refused T us = false) by (intros; unfold is_refused; rewrite A; reflexivity).
  assert (Z : forall shares, plan_shares T shares <> None).
  { intros shares. unfold plan_shares. rewrite Q. replace (existsb (is_refused T) (map (units_of T) shares)) with false; [discriminate|].
    induction shares; simpl; [reflexivity|]. rewrite Nh. assumption. }
  destruct p; simpl in E; [exact (Z _ E)| |exact (Z _ E)]. unfold plan_dealt in E. rewrite Nh, Q in E. discriminate.
Qed.
