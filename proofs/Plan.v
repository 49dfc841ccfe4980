(** R13: `plan_all` and `plan_ranks` of odb_ref/plan/planning.py, in either layout, from the samples to the micro-batches of each rank.
    Spec: R13.1 to R13.8. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Lists Types Alignment Packing Layouts PlanSettling PlanDivision PlanPadding.
Import ListNotations.

(** ** The model *)

(** The terms that all ranks plan by; [t_of] is the cost of a sample by its number of tokens. *)
Record terms := mkTerms {
  t_is_padded : bool; t_budget : nat; t_limits : list nat; t_of : nat -> nat; t_multiple : nat; t_at_least : nat; t_at_most : option nat;
  t_is_alone : bool; t_is_idle : bool; t_is_at_ends : bool;
  t_near : nat; t_far : nat; t_exchanged : nat; t_tried : nat }.

(** Samples of one key, in the order of their first sample. *)
Fixpoint join_one (key : sample -> nat) (gs : list group) (x : sample) : list group :=
  match gs with
  | [] => [[x]]
  | g :: r => if key (hd x g) =? key x then (g ++ [x]) :: r else g :: join_one key r x
  end.

Definition join (key : sample -> nat) (l : list sample) : list group := fold_left (join_one key) l [].

Section Plan.
Variable T : terms.

Notation limits := (t_limits T).

(** Samples as one unit with number [n]. In [costs], its use of each limit is followed by its cost, row by row, and its number of samples.
    *)
Definition unit_of (n : nat) (g : group) : sample :=
  mkSample n n (if t_is_padded T then longest g else total g) 0
    (map (fun r => used r g) (seq 0 (length limits)) ++ [row_cost (t_of T) g; length g]).

Definition unit_cost (u : sample) : nat := nth (length limits) (costs u) 0.
Definition unit_rows (u : sample) : nat := nth (S (length limits)) (costs u) 0.

(** How much of the budget a micro-batch takes, for samples or for units with [rows]; and whether it keeps the budget and the limits. *)
Definition taken (rows : sample -> nat) (g : group) : nat := if t_is_padded T then sum_over rows g * longest g else total g.

Definition is_kept (rows : sample -> nat) (g : group) : bool := (taken rows g <=? t_budget T) && is_within limits g.

Definition batch_cost (b : group) : nat := if t_is_padded T then charge unit_rows (t_of T) b else sum_over unit_cost b.

Definition units_of (gs : list group) : list sample := map (fun '(n, g) => unit_of n g) (combine (seq 0 (length gs)) gs).

(** The samples of a micro-batch of units. *)
Definition members (gs : list group) (b : group) : group := by_position (concat (map (fun u => nth (pos u) gs []) b)).

Definition fewest_of (units : list sample) (ranks : nat) : list group :=
  find_fewest unit_cost (t_budget T) limits (t_far T) (t_exchanged T) (t_tried T)
    (others (t_budget T) limits units) (length (loners (t_budget T) limits units)) (t_multiple T * ranks) (t_at_least T * ranks).

Definition need_of (units : list sample) (ranks : nat) : nat :=
  if t_is_padded T then need_padded unit_rows (t_of T) (t_budget T) limits units
  else length (loners (t_budget T) limits units) + length (fewest_of units ranks).

Definition divide_into (units : list sample) (count ranks : nat) : list group :=
  if t_is_padded T then divide_padded unit_rows (t_of T) (t_budget T) limits units count
  else divide unit_cost (t_budget T) limits (t_near T) (t_far T) (t_exchanged T) units (fewest_of units ranks) count ranks.

Definition round_up (n : nat) : nat := ceil (Nat.max n (t_at_least T)) (t_multiple T) * t_multiple T.

(** Reasons for refusal: a micro-batch is too large, there are too many, or, if ranks may not be idle, there are too few units. *)
Definition is_refused (units : list sample) : bool := negb (t_is_alone T) && existsb (fun x => negb (is_kept unit_rows [x])) units.

Definition is_count_refused (count : nat) (rows : list (list group)) : bool :=
  match t_at_most T with Some most => most <? count | None => false end ||
  negb (t_is_idle T) && existsb (fun row => length (concat row) <? count) rows.

(** By falling cost as they are, or with the costliest in the middle. *)
Fixpoint odds {A : Type} (l : list A) : list A := match l with [] => [] | x :: r => x :: match r with [] => [] | _ :: s => odds s end end.

Definition arrange {A : Type} (l : list A) : list A := if t_is_at_ends T then rev (odds l) ++ odds (tl l) else l.

(** The costliest micro-batch of a step goes to the rank that has the least so far. *)
Definition has_less (x y : nat * list group) : bool :=
  let a := sum_over batch_cost (snd x) in let b := sum_over batch_cost (snd y) in
  (a <? b) || ((a =? b) && (fst x <=? fst y)).

Fixpoint deal (ranks count : nat) (bs : list group) (rows : list (nat * list group)) : list (nat * list group) :=
  match count with
  | 0 => rows
  | S n => deal ranks n (skipn ranks bs) (map (fun '((r, row), b) => (r, row ++ [b])) (combine (sort_by has_less rows) (firstn ranks bs)))
  end.

Definition deal_out (ranks count : nat) (bs : list group) : list (list group) :=
  map snd (sort_by (fun x y => fst x <=? fst y) (deal ranks count bs (combine (seq 0 ranks) (repeat [] ranks)))).

Definition row_of (gs : list group) (row : list group) : list group := map (members gs) (arrange row).

(** Pools of units, given by their samples, each shared by a number of ranks: a pool for each rank, or one for all. *)
Definition plan_pools (pools : list (list group * nat)) : option (list (list (list group))) :=
  let count := round_up (list_max (map (fun '(gs, ranks) => ceil (need_of (units_of gs) ranks) ranks) pools)) in
  let dealt := map (fun '(gs, ranks) => deal_out ranks count (divide_into (units_of gs) (count * ranks) ranks)) pools in
  if existsb (fun '(gs, _) => is_refused (units_of gs)) pools || is_count_refused count (concat dealt) then None
  else Some (map (fun '((gs, _), rows) => map (row_of gs) rows) (combine pools dealt)).

(** Whole keys dealt out to ranks, the costliest first, each to the rank that has the least. *)
Definition homes (keys : list group) (ranks : nat) : list group :=
  let order := sort_by (fun x y => (unit_cost y <? unit_cost x) || ((unit_cost x =? unit_cost y) && (pos x <=? pos y))) (units_of keys) in
  match spread unit_cost (fun _ => true) order (empty_batches (repeat 0 ranks)) with
  | Some bs => map (fun b => members keys (b_group b)) bs
  | None => []
  end.
End Plan.

(** What is planned: samples that stay on their ranks, samples dealt out, or keys dealt out. *)
Inductive problem := Stay (own : list (list sample)) | Dealt (all : list sample) (ranks : nat) | Homes (all : list sample) (ranks : nat).

Definition pools_of (T : terms) (key : sample -> nat) (p : problem) : list (list group * nat) :=
  match p with
  | Stay own => map (fun mine => (join key mine, 1)) own
  | Dealt all ranks => [(join key all, ranks)]
  | Homes all ranks => map (fun home => (join pos home, 1)) (homes T (join key all) ranks)
  end.

Definition plan_of (T : terms) (key : sample -> nat) (p : problem) : option (list (list group)) :=
  option_map (@concat _) (plan_pools T (pools_of T key p)).

(** ** What every plan keeps *)

(** At least one cheapest micro-batch is considered, the multiple is at least 1, and a sample with a token costs something. Each sample
    has a token. *)
Definition terms_ok (T : terms) : Prop := 1 <= t_near T /\ 1 <= t_multiple T /\ forall n, 1 <= n -> 1 <= t_of T n.

Definition samples_ok (l : list sample) : Prop := Forall (fun x => 1 <= len x) l.

(** Samples that share a micro-batch: at least one, each with a token. *)
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
Notation room := (is_kept T (fun _ => 1)).
Notation unit_room := (is_kept T (unit_rows T)).

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

Lemma samples_take : forall g, taken T (fun _ => 1) g = if t_is_padded T then padded g else total g.
Proof. intros g. unfold taken, padded. replace (sum_over _ g) with (length g); [reflexivity|]. clear. induction g; simpl; congruence. Qed.

Lemma kept_perm : forall rows g h, Permutation g h -> is_kept T rows g = is_kept T rows h.
Proof.
  intros rows g h P. unfold is_kept, taken. f_equal; [|apply within_alike; intros r _; apply sum_over_perm, P].
  rewrite (sum_over_perm len P), (sum_over_perm rows P), (longest_perm _ _ P). reflexivity.
Qed.

(** A micro-batch of samples takes what its units take. *)
Lemma room_of_members : forall gs b, Forall (fun u => In u (units_of T gs)) b -> room (members gs b) = unit_room b.
Proof.
  intros gs b F. rewrite (kept_perm _ _ _ (members_perm gs b)). unfold is_kept, taken, expand.
  set (h := concat _).
  assert (E : sum_over (fun _ => 1) h = sum_over (unit_rows T) b /\
    (if t_is_padded T then longest h else total h) = (if t_is_padded T then longest b else total b) /\
    forall r, r < length limits -> used r h = used r b).
  { unfold h. clear h. induction F as [|u b I F [IR [IT IU]]]; simpl; [auto|]. destruct (units_are gs u I) as [g [_ [Nh U]]]. rewrite Nh.
    split; [|split].
    - rewrite sum_over_app, IR. f_equal. rewrite U. unfold unit_rows. simpl.
      rewrite app_nth2; rewrite map_length, seq_length; [|lia]. replace (S _ - _) with 1 by lia. simpl. clear. induction g; simpl; congruence.
    - assert (Len : len u = if t_is_padded T then longest g else total g) by (rewrite U; reflexivity). rewrite Len.
      destruct (t_is_padded T); rewrite ?longest_app, ?sum_over_app; congruence.
    - intros r L. rewrite sum_over_app, (IU r L). f_equal. rewrite U. simpl. rewrite app_nth1 by (rewrite map_length, seq_length; exact L).
      rewrite nth_indep with (d' := used 0 g) by (rewrite map_length, seq_length; exact L).
      rewrite (map_nth (fun r => used r g)), seq_nth by exact L. reflexivity. }
  destruct E as [R [E W]]. f_equal; [|apply within_alike, W]. destruct (t_is_padded T); congruence.
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

Lemma units_are_some : forall gs, groups_ok gs -> have_rows (unit_rows T) (units_of T gs) /\ Forall (fun u => 1 <= unit_cost T u) (units_of T gs).
Proof.
  intros gs G. split; apply Forall_forall; intros u I; destruct (units_are gs u I) as [g [Ig [_ U]]]; rewrite U; unfold unit_rows, unit_cost; simpl;
    rewrite app_nth2, map_length, seq_length by (rewrite map_length, seq_length; lia); unfold groups_ok in G; rewrite Forall_forall in G;
    destruct (G g Ig) as [Nh Sm]; destruct g as [|x g]; try contradiction; inversion Sm; subst.
  - replace (S _ - _) with 1 by lia. simpl. destruct (t_is_padded T); lia.
  - rewrite Nat.sub_diag. destruct ok as [_ [_ C]]. simpl. pose proof (C (len x)). lia.
Qed.

(** A micro-batch of a plan of the units [gs]: within the budget and the limits or, if the terms allow, a unit too large for them by
    itself. *)
Definition batch_ok (gs : list group) (g : group) : Prop :=
  room g = true \/ t_is_alone T = true /\ room g = false /\ exists k, In k gs /\ Permutation g k.

Definition is_single (gs : list group) (g : group) : Prop := g = [] \/ exists k, In k gs /\ Permutation g k.

(** A rank's row for the units [gs]: [count] micro-batches, each of them right, and an empty one only if none has two units. *)
Definition row_ok (count : nat) (gs : list group) (row : list group) : Prop :=
  length row = count /\ Forall (batch_ok gs) row /\ (In [] row -> Forall (is_single gs) row).

Lemma finished_row : forall count gs row, groups_ok gs -> is_refused T (units_of T gs) = false -> length row = count ->
  Forall (Forall (fun u => In u (units_of T gs))) row ->
  Forall (fun b => unit_room b = true \/ exists x, b = [x] /\ unit_room [x] = false) row ->
  (In [] row -> Forall (fun b => length b <= 1) row) ->
  row_ok count gs (row_of T gs row).
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

(** The units of a division, into any sufficient number of micro-batches. *)
Lemma divided : forall gs steps ranks, groups_ok gs -> 1 <= ranks -> need_of T (units_of T gs) ranks <= steps * ranks ->
  let bs := divide_into T (units_of T gs) (steps * ranks) ranks in
  Permutation (concat bs) (units_of T gs) /\ Forall (fun b => unit_room b = true \/ exists x, b = [x] /\ unit_room [x] = false) bs /\
  length bs = steps * ranks /\ is_filled_up bs.
Proof.
  intros gs steps ranks G R. unfold need_of, divide_into, is_kept, taken. pose proof ok as [Near [_ C]]. destruct (t_is_padded T); intros Nh.
  - apply a_padded_division_is_right; [exact C|apply units_are_some, G|exact Nh].
  - apply a_division_is_right; auto; [apply units_are_some, G|].
    apply the_fewest_hold_exactly_the_units. apply Forall_forall. intros x I. apply filter_In in I. apply I.
Qed.

Lemma of_units : forall gs bs, Permutation (concat bs) (units_of T gs) -> Forall (Forall (fun u => In u (units_of T gs))) bs.
Proof.
  intros gs bs P. apply Forall_forall. intros b I. apply Forall_forall. intros u Iu. eapply Permutation_in; [exact P|]. apply in_concat. eauto.
Qed.

(** Each unit is within one micro-batch. *)
Definition shares_batches (gs : list group) (gs' : list group) : Prop := forall k, In k gs -> exists g, In g gs' /\ incl k g.

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

(** The rows of the ranks that share a pool. *)
Definition pool_ok (count : nat) (pool : list group * nat) (rows : list (list group)) : Prop :=
  Permutation (concat (concat rows)) (concat (fst pool)) /\ length rows = snd pool /\ Forall (row_ok count (fst pool)) rows /\
  shares_batches (fst pool) (concat rows).

Lemma dealt_pool : forall gs ranks count, groups_ok gs -> 1 <= ranks -> is_refused T (units_of T gs) = false ->
  ceil (need_of T (units_of T gs) ranks) ranks <= count ->
  pool_ok count (gs, ranks) (map (row_of T gs) (deal_out T ranks count (divide_into T (units_of T gs) (count * ranks) ranks))).
Proof.
  intros gs ranks count G R X C. destruct (divided gs count ranks G R) as [P [B [L E]]].
  { eapply Nat.le_trans; [apply (ceil_enough _ ranks R)|apply Nat.mul_le_mono_r, C]. }
  set (bs := divide_into T _ _ _) in *. destruct (deal_out_is ranks count bs L) as [Q [Lr F]]. set (dealt := deal_out T ranks count bs) in *.
  unfold pool_ok. simpl. rewrite map_length. split; [|split; [exact Lr|split]].
  - transitivity (expand gs (concat (concat dealt))).
    + clear. induction dealt as [|row dealt IH]; simpl; [reflexivity|]. rewrite concat_app, IH. unfold row_of.
      rewrite members_concat, (expand_perm gs _ _ (concat_perm _ _ _ (arrange_perm T _ _))). unfold expand.
      rewrite concat_app, map_app, concat_app. reflexivity.
    + rewrite (expand_perm gs _ _ (concat_perm _ _ _ Q)), (expand_perm gs _ _ P), expand_units. reflexivity.
  - assert (S : forall row b, In row dealt -> In b row -> In b bs).
    { intros row b Ir Ib. eapply Permutation_in; [exact Q|]. apply in_concat. eauto. }
    pose proof (of_units gs bs P) as U. rewrite Forall_forall in F, B, U. apply Forall_map, Forall_forall. intros row I.
    apply finished_row; auto; try (apply Forall_forall; intros b Ib; [exact (U b (S row b I Ib))||exact (B b (S row b I Ib))]).
    intros Ie. destruct E as [E|E]; rewrite Forall_forall in E; [contradiction (E [] (S row [] I Ie) eq_refl)|]. apply Forall_forall. intros b Ib. apply E, (S row b I Ib).
  - intros k I. rewrite <- Q in P. destruct (a_unit_is_in_its_batch gs (concat dealt) k P I) as [b [Ib Sb]]. exists (members gs b).
    split; [|exact Sb]. apply in_concat in Ib. destruct Ib as [row [Ir Ib]]. apply in_concat. exists (row_of T gs row).
    split; [apply in_map, Ir|]. apply in_map. eapply Permutation_in; [symmetry; apply arrange_perm|exact Ib].
Qed.

Theorem a_plan_of_pools_is_right : forall pools rows, Forall (fun pool => groups_ok (fst pool) /\ 1 <= snd pool) pools ->
  plan_pools T pools = Some rows -> exists count, count_ok count /\ Forall2 (pool_ok count) pools rows.
Proof.
  intros pools rows G E. unfold plan_pools in E. set (count := round_up T _) in E. destruct (_ || _) eqn:X; [discriminate|]. injection E as <-.
  apply orb_false_iff in X. destruct X as [X Y]. exists count. destruct (round_up_ok _ : _ <= count /\ _) as [_ [K L]]. split.
  { split; [exact K|]. split; [exact L|]. intros most E. unfold is_count_refused in Y. rewrite E in Y. apply orb_false_iff in Y as [Y _]. apply Nat.ltb_ge, Y. }
  assert (C : Forall (fun k => k <= count) (map (fun '(gs, ranks) => ceil (need_of T (units_of T gs) ranks) ranks) pools)).
  { apply list_max_le. exact (proj1 (round_up_ok _)). }
  clear Y K L. clearbody count. induction pools as [|[gs ranks] pools IH]; simpl in *; [constructor|].
  inversion G as [|? ? [Gg R] Gs]; subst. inversion C; subst. apply orb_false_iff in X. destruct X as [Xg Xs].
  constructor; [apply dealt_pool; assumption|apply IH; assumption].
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

(** Groups of one key each, with no two of the same key. *)
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

(** The units of a problem: the samples that share a micro-batch. *)
Definition units_in_plan (T : terms) (key : sample -> nat) (p : problem) : list group := concat (map fst (pools_of T key p)).

Lemma pools_are : forall T key p, problem_ok p -> let pools := pools_of T key p in
  Forall (fun pool => groups_ok (fst pool) /\ 1 <= snd pool) pools /\
  Permutation (concat (units_in_plan T key p)) (asked_of p) /\ sum_over snd pools = ranks_of p.
Proof.
  intros T key p [R S].
  assert (Each : forall k own, samples_ok (concat own) -> let pools := map (fun mine => (join k mine, 1)) own in
    Forall (fun pool => groups_ok (fst pool) /\ 1 <= snd pool) pools /\ Permutation (concat (concat (map fst pools))) (concat own) /\
    sum_over snd pools = length own).
  { intros k. induction own as [|mine own IH]; simpl; intros O; [auto|]. apply Forall_app in O. destruct O as [Om Oo]. destruct (IH Oo) as [A [B C]].
    split; [constructor; [split; [apply join_ok, Om|apply le_n]|exact A]|]. rewrite concat_app, B, C, (proj1 (join_is k mine)). auto. }
  destruct p as [own|all ranks|all ranks]; unfold units_in_plan; simpl in *; [apply Each, S| |].
  - rewrite app_nil_r, Nat.add_0_r. split; [repeat constructor; [apply join_ok, S|exact R]|]. split; [apply join_is|reflexivity].
  - destruct (homes_are T (join key all) ranks R) as [L [Q _]]. rewrite (proj1 (join_is key all)) in Q.
    destruct (Each pos (homes T (join key all) ranks)) as [A [B C]]; [eapply Forall_perm; [symmetry; exact Q|exact S]|].
    rewrite B, C, Q, L. auto.
Qed.

Lemma row_ok_more : forall T count gs hs row, incl gs hs -> row_ok T count gs row -> row_ok T count hs row.
Proof.
  intros T count gs hs row S [L [B E]]. split; [exact L|]. split.
  - eapply Forall_impl; [|exact B]. intros g [R|[A [R [k [I P]]]]]; [left; exact R|right]. eauto 6.
  - intros I. eapply Forall_impl; [|exact (E I)]. intros g [Z|[k [Ik P]]]; [left; exact Z|right]. eauto.
Qed.

(** A plan has each sample once, on its own rank if samples stay. Each rank has the same number of micro-batches, which meets the terms.
    None exceeds the budget or a limit, except a unit by itself. One is empty only if its rank has none with two units. *)
Theorem a_plan_is_right : forall T key p rows, terms_ok T -> problem_ok p -> plan_of T key p = Some rows ->
  Permutation (concat (concat rows)) (asked_of p) /\ length rows = ranks_of p /\
  (exists count, count_ok T count /\ Forall (row_ok T count (units_in_plan T key p)) rows) /\
  forall own, p = Stay own -> Forall2 (fun mine row => Permutation (concat row) mine) own rows.
Proof.
  intros T key p rows ok asked E. unfold plan_of in E. destruct (plan_pools _ _) as [found|] eqn:Found; [|discriminate]. injection E as <-.
  destruct (pools_are T key p asked) as [G [P S]]. destruct (a_plan_of_pools_is_right T ok _ _ G Found) as [count [K F]].
  rewrite <- P, <- S. unfold units_in_plan in *. clear asked P S G Found. split; [|split; [|split]].
  - induction F as [|pool rows pools found [Q _] F IH]; simpl; [constructor|]. rewrite !concat_app, Q, IH. reflexivity.
  - induction F as [|pool rows pools found [_ [L _]] F IH]; simpl; [reflexivity|]. rewrite app_length, L, IH. reflexivity.
  - exists count. split; [exact K|]. induction F as [|pool rows pools found [_ [_ [R _]]] F IH]; simpl; [constructor|]. apply Forall_app. split.
    + eapply Forall_impl; [|exact R]. intros row. apply row_ok_more, incl_appl, incl_refl.
    + eapply Forall_impl; [|exact IH]. intros row. apply row_ok_more, incl_appr, incl_refl.
  - intros own ->. simpl in F. revert found F. induction own as [|mine own IH]; simpl; intros found F; inversion F as [|? rows ? ? [Q [L _]] F']; subst; [constructor|].
    destruct rows as [|row [|]]; try discriminate. simpl in *. rewrite app_nil_r, (proj1 (join_is key mine)) in Q. constructor; auto.
Qed.

Theorem a_plan_keeps_keys_together : forall T key p rows x y, terms_ok T -> problem_ok p -> plan_of T key p = Some rows -> key x = key y ->
  match p with
  | Stay own => forall mine, In mine own -> In x mine -> In y mine -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
  | Dealt all _ => In x all -> In y all -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
  | Homes all _ => In x all -> In y all -> exists row, In row rows /\ In x (concat row) /\ In y (concat row)
  end.
Proof.
  intros T key p rows x y ok asked E Same. unfold plan_of in E. destruct (plan_pools _ _) as [found|] eqn:Found; [|discriminate]. injection E as <-.
  destruct (pools_are T key p asked) as [G _]. destruct (a_plan_of_pools_is_right T ok _ _ G Found) as [count [_ F]].
  assert (C : forall pool, In pool (pools_of T key p) -> exists rows, incl rows (concat found) /\ pool_ok T count pool rows).
  { clear Found G. induction F as [|pool rows pools found Q F IH]; simpl; [intros _ []|]. intros q [<-|I].
    - exists rows. split; [apply incl_appl, incl_refl|exact Q].
    - destruct (IH q I) as [r [A B]]. exists r. split; [apply incl_appr, A|exact B]. }
  assert (D : forall mine ranks, In (join key mine, ranks) (pools_of T key p) -> In x mine -> In y mine ->
    exists row g, In row (concat found) /\ In g row /\ In x g /\ In y g).
  { intros mine ranks I X Y. destruct (C _ I) as [r [A [_ [_ [_ B]]]]]. destruct (join_together key mine x y X Y Same) as [k [Ik [Xk Yk]]].
    destruct (B k Ik) as [g [Ig S]]. apply in_concat in Ig. destruct Ig as [row [Ir Ig]]. exists row, g. auto. }
  destruct p as [own|all ranks|all ranks]; simpl in *.
  - intros mine I. apply (D mine 1). apply in_map_iff. eauto.
  - apply (D all ranks). auto.
  - intros X Y. destruct (homes_are T (join key all) ranks (proj1 asked)) as [_ [_ H]].
    destruct (join_together key all x y X Y Same) as [k [Ik [Xk Yk]]]. destruct (H k Ik) as [home [Ih S]].
    destruct (C (join pos home, 1)) as [r [A [Q [L _]]]]; [apply in_map_iff; eauto|]. simpl in *. rewrite (proj1 (join_is pos home)) in Q.
    destruct r as [|row [|]]; try discriminate. simpl in Q. rewrite app_nil_r in Q. exists row. split; [apply A; left; reflexivity|].
    split; (eapply Permutation_in; [symmetry; exact Q|]); auto.
Qed.

Theorem a_plan_is_refused_for_a_reason : forall T key p, plan_of T key p = None ->
  t_is_alone T = false \/ t_at_most T <> None \/ t_is_idle T = false.
Proof.
  intros T key p E. destruct (t_is_alone T) eqn:A; [|auto]. destruct (t_at_most T) eqn:M; [right; left; discriminate|].
  destruct (t_is_idle T) eqn:I; [exfalso|auto]. revert E. unfold plan_of, plan_pools, is_count_refused. rewrite M, I.
  replace (existsb _ _) with false; [discriminate|]. symmetry. unfold is_refused. rewrite A.
  generalize (pools_of T key p). induction l as [|[gs r] l IH]; [reflexivity|exact IH].
Qed.
