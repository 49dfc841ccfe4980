(** Dividing units into micro-batches, of odb_ref/plan/division.py and packing.py, in the packed layout: as few as are found, or so many,
    settled. Spec: R13.3, R13.4, R13.5. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Types Alignment Packing PlanSettling.
Import ListNotations.

(** ** The model *)

Definition ceil (n d : nat) : nat := (n + d - 1) / d.

Section Division.
(** Units take tokens, [len], and of each limit what [costs] say; what they cost is what is balanced. *)
Variable cost : sample -> nat.
Variable budget : nat.
Variable limits : list nat.
(** Among how many of the cheapest a unit finds another, and the same where that decides how many micro-batches are needed; up to how many units
    are exchanged, and for how many a second order is tried. *)
Variables near far exchanged tried : nat.

Notation room := (is_roomy budget limits).

(** By falling tokens, then falling cost, then number. *)
Definition goes_before (x y : sample) : bool :=
  (len y <? len x) || ((len x =? len y) && ((cost y <? cost x) || ((cost x =? cost y) && (pos x <=? pos y)))).

(** What a unit takes of each thing that is bounded, with the bound. *)
Definition takes (x : sample) : list (nat * nat) :=
  (len x, budget) :: map (fun '(r, limit) => (nth r (costs x) 0, limit)) (combine (seq 0 (length limits)) limits).

Definition larger (x y : nat * nat) : nat * nat := if fst y * snd x <=? fst x * snd y then x else y.

Definition need (x : sample) : nat * nat := fold_left larger (takes x) (0, 1).

(** By the largest share that a unit takes of anything bounded, falling. *)
Definition needier (x y : sample) : bool :=
  let (a, b) := need x in let (c, d) := need y in (c * b <? a * d) || ((c * b =? a * d) && (pos x <=? pos y)).

(** Best fit: [x] joins the first with so many tokens less one into which it fits, and comes to the front, or begins one there. *)
Fixpoint take_fullest (x : sample) (most : nat) (gs : list group) : option (group * list group) :=
  match gs with
  | [] => None
  | g :: r =>
      if is_open budget limits x g && (S (total g) =? most) then Some (g, r)
      else match take_fullest x most r with Some (h, s) => Some (h, g :: s) | None => None end
  end.

Definition put_front (gs : list group) (x : sample) : list group :=
  match take_fullest x (fullest budget limits x gs) gs with
  | Some (g, r) => (g ++ [x]) :: r
  | None => [x] :: gs
  end.

Fixpoint place_of (x : sample) (l : list sample) : nat :=
  match l with [] => 0 | y :: r => if pos y =? pos x then 0 else S (place_of x r) end.

Definition begun (order : list sample) (g : group) : nat := match g with [] => 0 | x :: _ => place_of x order end.

(** In the order in which they were begun. *)
Definition pack (order : list sample) : list group :=
  sort_by (fun g h => begun order g <=? begun order h) (fold_left put_front order []).

Definition pack_either_way (units : list sample) : list group :=
  let found := pack (sort_by goes_before units) in
  match limits with
  | [] => found
  | _ => if length units <=? tried
      then let other := pack (sort_by needier units) in if length other <? length found then other else found
      else found
  end.

(** Each unit goes to the one that costs least, by [c], of those with room. *)
Fixpoint spread (c : sample -> nat) (ok : group -> bool) (order : list sample) (bs : list batch) : option (list batch) :=
  match order with
  | [] => Some bs
  | x :: r =>
      match choose c (fun b => ok (b_group b ++ [x])) Nat.ltb 0 bs with
      | Some (i, b) => spread c ok r (set_nth i (mkBatch (b_start b) true (b_group b ++ [x])) bs)
      | None => None
      end
  end.

Definition empty_batches (starts : list nat) : list batch := map (fun s => mkBatch s true []) starts.

Definition spread_in (units : list sample) (starts : list nat) : option (list batch) :=
  spread cost room (sort_by goes_before units) (empty_batches starts).

Definition are_swapped (units : list sample) : bool := length units <=? exchanged.

(** By tokens, without a budget, and settled until the costliest keeps it. *)
Definition even_out (units : list sample) (count : nat) : option (list batch) :=
  match limits with
  | [] =>
      if are_swapped units then
        match spread len (fun _ => true) (sort_by goes_before units) (empty_batches (repeat 0 count)) with
        | Some bs =>
            let found := settled len (fun _ => true) far (Some budget) true bs in
            if is_even len budget found then Some found else None
        | None => None
        end
      else None
  | _ => None
  end.

Definition find (units : list sample) (count : nat) : option (list batch) :=
  match spread_in units (repeat 0 count) with Some bs => Some bs | None => even_out units count end.

(** R13.10: how many micro-batches there must be. *)
Definition least (units : list sample) : nat :=
  let of_bound r bound := let column := map (fun x => fst (nth r (takes x) (0, 0))) units in
    Nat.max (ceil (sum_over id column) bound) (length (filter (fun n => bound <? 2 * n) column)) in
  fold_left Nat.max (map (fun '(r, bound) => of_bound r bound) (combine (seq 0 (S (length limits))) (budget :: limits))) 0.

(** The fewest that are found, [count] saying of how many micro-batches so many steps are. *)
Fixpoint bisect (units : list sample) (count : nat -> nat) (fuel low middle high : nat) (found : list group) : list group :=
  match fuel with
  | 0 => found
  | S fuel =>
      if low <? high then
        match find units (count middle) with
        | Some bs => bisect units count fuel low ((low + middle) / 2) middle (map b_group bs)
        | None => bisect units count fuel (S middle) ((S middle + high) / 2) high found
        end
      else found
  end.

Definition is_filled (g : group) : bool := negb (length g =? 0).

(** Of units none of which is alone; [whole] is what the micro-batches of all ranks are a multiple of. *)
Definition find_fewest (units : list sample) (alone whole at_least : nat) : list group :=
  let packed := pack_either_way units in
  let low := ceil (Nat.max (least units + alone) at_least) whole in
  let high := Nat.max low (ceil (length packed + alone) whole) in
  filter is_filled (bisect units (fun steps => steps * whole - alone) (high - low) low low high packed).

Definition others (units : list sample) : list sample := filter (fun x => room [x]) units.
Definition loners (units : list sample) : list sample := filter (fun x => negb (room [x])) units.

(** Of costs that fall, the first of every [ranks]. *)
Fixpoint every (ranks skip : nat) (l : list nat) : list nat :=
  match l with
  | [] => []
  | x :: r => match skip with 0 => x :: every ranks (ranks - 1) r | S k => every ranks k r end
  end.

Fixpoint levels (ranks : nat) (falling : list nat) (steps left : nat) : list nat :=
  match steps, falling with
  | S s, f :: r =>
      if left <? S s * ranks * f then f :: levels ranks r s (left - ranks * f) else repeat (ceil left (ranks * S s)) (S s)
  | _, _ => repeat (ceil left (ranks * Nat.max 1 steps)) steps
  end.

(** What micro-batches cost before they hold anything, so that those of a step come out alike. *)
Definition starts_of (units : list sample) (count ranks : nat) : list nat :=
  let all := map cost units in
  let found := levels ranks (every ranks 0 (sort_by (fun a b => b <=? a) all)) (count / ranks) (sum_over id all) in
  flat_map (fun level => repeat (hd 0 found - level) ranks) found.

Definition settle_all (units : list sample) (bs : list batch) : list group :=
  map b_group (settled cost room near None (are_swapped units) bs).

Definition as_batches (gs : list group) : list batch := map (mkBatch 0 true) gs.

Definition divide_evenly (units : list sample) (fewest : list group) (count : nat) : list group :=
  let fallback := as_batches (fewest ++ repeat [] (count - length fewest)) in
  settle_all units
    match spread_in units (repeat 0 count) with
    | Some bs => as_batches (map b_group bs)
    | None =>
        match (if length fewest <? count then even_out units count else None) with
        | Some bs => as_batches (map b_group bs)
        | None => fallback
        end
    end.

Definition divide_others (units : list sample) (fewest : list group) (count : nat) (starts : list nat) : list group :=
  if existsb (fun s => 0 <? s) starts then
    match spread_in units starts with
    | Some bs => if forallb is_filled (map b_group bs) then settle_all units bs else divide_evenly units fewest count
    | None => divide_evenly units fewest count
    end
  else divide_evenly units fewest count.

Definition first_of (g : group) : nat := match g with [] => 0 | x :: r => fold_left (fun n y => Nat.min n (pos y)) r (pos x) end.

(** The costliest first. *)
Definition costlier (g h : group) : bool :=
  (spent cost h <? spent cost g) || ((spent cost g =? spent cost h) && (first_of g <=? first_of h)).

Definition divide (units : list sample) (fewest : list group) (count ranks : nat) : list group :=
  let alone := loners units in
  let left := count - length alone in
  let starts := if (1 <? ranks) && (length alone =? 0) then starts_of units left ranks else [] in
  sort_by costlier (divide_others (others units) fewest left starts ++ map (fun x => [x]) alone).
End Division.
