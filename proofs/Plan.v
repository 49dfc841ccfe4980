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
