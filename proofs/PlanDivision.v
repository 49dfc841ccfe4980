(** Dividing units into micro-batches in the packed layout, of odb_ref/plan/division.py and packing.py: into the fewest that are found, or
    into a given number, settled. Spec: R13.3, R13.4, R13.5. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Lists Types Alignment Packing PlanSettling.
Import ListNotations.

(** Micro-batches of the units that fit by themselves, together with each other unit alone, in any order. *)
Lemma beside_loners : forall (room : group -> bool) units found gs, let alone := filter (fun x => negb (room [x])) units in
  Permutation (concat found) (filter (fun x => room [x]) units) -> Forall (fun g => room g = true) found ->
  Permutation gs (found ++ map (fun x => [x]) alone) ->
  Permutation (concat gs) units /\ Forall (fun g => room g = true \/ exists x, g = [x] /\ room [x] = false) gs /\
  length gs = length found + length alone /\ forall P : group -> Prop, (forall x, P [x]) -> Forall P found -> Forall P gs.
Proof.
  intros room units found gs alone C R E.
  assert (Each : forall P : group -> Prop, (forall x, In x alone -> P [x]) -> Forall P found -> Forall P gs).
  { intros P One F. eapply Forall_perm; [symmetry; exact E|]. apply Forall_app. split; [exact F|apply Forall_map, Forall_forall, One]. }
  split; [|split; [|split]].
  - rewrite (concat_perm _ _ _ E), concat_app, singles_are, C. apply filter_split.
  - apply Each; [|eapply Forall_impl; [|exact R]; auto]. intros x I. apply filter_In in I as [_ I]. right. exists x. split; [reflexivity|].
    destruct (room [x]); [discriminate|reflexivity].
  - rewrite (Permutation_length E), app_length, map_length. reflexivity.
  - intros P One. apply Each. auto.
Qed.

(** ** The model *)

Definition ceil (n d : nat) : nat := (n + d - 1) / d.

Section Division.
(** A unit takes [len] tokens, and of each limit the amount in [costs]. [cost] is what is balanced. *)
Variables (cost : sample -> nat) (budget : nat) (limits : list nat).
(** How many of the cheapest micro-batches are considered for an exchange: [near] in general, [far] when this decides how many micro-batches
    are needed. Units are exchanged for each other up to [exchanged] units, and a second order is tried up to [tried] units. *)
Variables near far exchanged tried : nat.

Notation room := (is_roomy budget limits).

(** By falling tokens, then falling cost, then number. *)
Definition goes_before (x y : sample) : bool :=
  (len y <? len x) || ((len x =? len y) && ((cost y <? cost x) || ((cost x =? cost y) && (pos x <=? pos y)))).

(** What a unit takes of each bounded resource, with the bound. *)
Definition takes (x : sample) : list (nat * nat) :=
  (len x, budget) :: map (fun '(r, limit) => (nth r (costs x) 0, limit)) (combine (seq 0 (length limits)) limits).

Definition larger (x y : nat * nat) : nat * nat := if fst y * snd x <=? fst x * snd y then x else y.

Definition need (x : sample) : nat * nat := fold_left larger (takes x) (0, 1).

(** By the largest share that a unit takes of any bounded resource, falling. *)
Definition needier (x y : sample) : bool :=
  let (a, b) := need x in let (c, d) := need y in (c * b <? a * d) || ((c * b =? a * d) && (pos x <=? pos y)).

(** Best fit: [x] joins the first micro-batch into which it fits and that has [most] - 1 tokens, which then moves to the front. If there is
    none, [x] begins a new one at the front. *)
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

(** Each unit goes to the micro-batch with room that costs least by [c]. *)
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

(** Spread by tokens, without a budget, and settled until the costliest keeps it. *)
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

(** R13.10: a lower bound on the number of micro-batches. *)
Definition least (units : list sample) : nat :=
  let of_bound r bound := let column := map (fun x => fst (nth r (takes x) (0, 0))) units in
    Nat.max (ceil (sum column) bound) (length (filter (fun n => bound <? 2 * n) column)) in
  fold_left Nat.max (map (fun '(r, bound) => of_bound r bound) (combine (seq 0 (S (length limits))) (budget :: limits))) 0.

(** The fewest micro-batches that are found; [count] gives their number from the number of steps. *)
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

(** For units that all fit, beside [alone] others; the number of micro-batches of all ranks is a multiple of [whole]. *)
Definition find_fewest (units : list sample) (alone whole at_least : nat) : list group :=
  let packed := pack_either_way units in
  let low := ceil (Nat.max (least units + alone) at_least) whole in
  let high := Nat.max low (ceil (length packed + alone) whole) in
  filter is_filled (bisect units (fun steps => steps * whole - alone) (high - low) low low high packed).

Definition others (units : list sample) : list sample := filter (fun x => room [x]) units.
Definition loners (units : list sample) : list sample := filter (fun x => negb (room [x])) units.

(** Every [ranks]-th of falling costs, from the first on. *)
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

(** The costs with which micro-batches begin, so that those of one step come out alike. *)
Definition starts_of (units : list sample) (count ranks : nat) : list nat :=
  let all := map cost units in
  let found := levels ranks (every ranks 0 (sort_by (fun a b => b <=? a) all)) (count / ranks) (sum all) in
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
  (sum_over cost h <? sum_over cost g) || ((sum_over cost g =? sum_over cost h) && (first_of g <=? first_of h)).

Definition divide (units : list sample) (fewest : list group) (count ranks : nat) : list group :=
  let alone := loners units in
  let left := count - length alone in
  let starts := if (1 <? ranks) && (length alone =? 0) then starts_of units left ranks else [] in
  sort_by costlier (divide_others (others units) fewest left starts ++ map (fun x => [x]) alone).
(** ** What every division keeps *)

(** Each unit once, in micro-batches within the bounds. *)
Definition holds (units : list sample) (gs : list group) : Prop :=
  Permutation (concat gs) units /\ Forall (fun g => room g = true) gs.

Definition fit_alone (units : list sample) : Prop := Forall (fun x => room [x] = true) units.

Lemma room_of_part : forall x g, room (x :: g) = true -> room g = true.
Proof.
  intros x g R. destruct (room g) eqn:E; [reflexivity|]. rewrite <- R. symmetry.
  apply (roomy_le budget limits g (x :: g)); [simpl; lia|intros r; simpl; lia|exact E].
Qed.

Lemma spread_is : forall c ok order bs new, spread c ok order bs = Some new ->
  length new = length bs /\ Permutation (units_in new) (order ++ units_in bs) /\
  (Forall (fun b => ok (b_group b) = true) bs -> Forall (fun b => ok (b_group b) = true) new).
Proof.
  induction order as [|x order IH]; simpl; intros bs new E; [injection E as <-; auto|].
  destruct (choose _ _ _ _ _) as [[i b]|] eqn:C; [|discriminate]. apply choose_in in C. rewrite Nat.sub_0_r in C. destruct C as [_ [Nh Ok]].
  apply IH in E. destruct E as [L [P K]]. rewrite set_nth_length in L. split; [exact L|]. split.
  - rewrite P. apply (Permutation_app_inv_l (b_group b)). rewrite Permutation_app_swap_app, (set_nth_units i _ b bs Nh). simpl.
    rewrite <- app_assoc, Permutation_app_swap_app. apply Permutation_app_head. simpl. symmetry. apply Permutation_middle.
  - intros F. apply K, set_nth_forall; assumption.
Qed.

Lemma units_in_empty : forall starts, units_in (empty_batches starts) = [].
Proof. induction starts; simpl; auto. Qed.

Lemma room_of_none : room [] = true.
Proof. unfold is_roomy, is_within. simpl. apply forallb_forall. intros [r limit] _. reflexivity. Qed.

Lemma spread_in_holds : forall units starts bs, spread_in units starts = Some bs ->
  holds units (map b_group bs) /\ length bs = length starts.
Proof.
  intros units starts bs E. apply spread_is in E. destruct E as [L [P F]]. unfold empty_batches in L at 1. rewrite map_length in L.
  split; [|exact L]. split; [|apply Forall_map, F, Forall_map, Forall_forall; intros s _; exact room_of_none].
  unfold units_in at 1 in P. rewrite P, units_in_empty, app_nil_r. apply sort_by_perm.
Qed.

(** Packing. *)
Lemma take_fullest_is : forall x most gs g r, take_fullest x most gs = Some (g, r) -> Permutation (g :: r) gs /\ is_open budget limits x g = true.
Proof.
  induction gs as [|h gs IH]; simpl; intros g r E; [discriminate|]. destruct (is_open budget limits x h && _) eqn:O.
  - injection E as <- <-. apply andb_true_iff in O. split; [reflexivity|apply O].
  - destruct (take_fullest x most gs) as [[k s]|]; [|discriminate]. injection E as <- <-. destruct (IH k s eq_refl) as [P I].
    split; [|exact I]. rewrite perm_swap, P. reflexivity.
Qed.

Lemma put_front_holds : forall x l gs, room [x] = true -> holds l gs -> holds (x :: l) (put_front gs x).
Proof.
  intros x l gs R [P F]. unfold put_front. destruct (take_fullest _ _ _) as [[g r]|] eqn:E.
  - apply take_fullest_is in E. destruct E as [Q O]. pose proof (Forall_perm _ _ _ _ (Permutation_sym Q) F) as G. inversion G; subst. split.
    + simpl. rewrite <- app_assoc. simpl. rewrite <- Permutation_middle. constructor. rewrite <- P. exact (concat_perm _ _ _ Q).
    + constructor; [exact O|assumption].
  - split; [simpl; constructor; exact P|constructor; assumption].
Qed.

Lemma pack_holds : forall order, fit_alone order -> holds order (pack order).
Proof.
  intros order F. unfold pack.
  assert (H : holds order (fold_left put_front order [])).
  { assert (G : forall l done gs, fit_alone l -> holds done gs -> holds (rev l ++ done) (fold_left put_front l gs)).
    { induction l as [|x l IH]; simpl; intros done gs Fl H; [exact H|]. inversion Fl; subst. rewrite <- app_assoc.
      apply IH; [assumption|]. apply put_front_holds; assumption. }
    destruct (G order [] [] F) as [P R]; [split; constructor|]. rewrite app_nil_r in P. split; [|exact R].
    rewrite P. symmetry. apply Permutation_rev. }
  destruct H as [P R]. split; [rewrite (concat_perm _ _ _ (sort_by_perm _ _ _)); exact P|apply sort_by_forall, R].
Qed.

Lemma pack_sorted_holds : forall before units, fit_alone units -> holds units (pack (sort_by before units)).
Proof.
  intros before units F. destruct (pack_holds (sort_by before units)) as [P R]; [apply sort_by_forall, F|].
  split; [rewrite P; apply sort_by_perm|exact R].
Qed.

Lemma pack_either_way_holds : forall units, fit_alone units -> holds units (pack_either_way units).
Proof.
  intros units F. unfold pack_either_way. destruct limits eqn:E; [apply pack_sorted_holds, F|].
  destruct (length units <=? tried); [destruct (_ <? _)|]; apply pack_sorted_holds, F.
Qed.

Lemma even_out_holds : forall units count bs, even_out units count = Some bs -> holds units (map b_group bs) /\ length bs = count.
Proof.
  intros units count bs. unfold even_out, holds, is_roomy. destruct limits as [|]; [|discriminate]. destruct (are_swapped units); [|discriminate].
  destruct (spread _ _ _ _) as [begun|] eqn:S; [|discriminate]. destruct (is_even _ _ _) eqn:V; [|discriminate]. intros E. injection E as <-.
  apply spread_is in S. destruct S as [L [P _]]. unfold empty_batches in L. rewrite map_length, repeat_length in L.
  rewrite units_in_empty, app_nil_r in P. split; [split|].
  - unfold settled. change (concat (map b_group (?x))) with (units_in x). rewrite settling_loses_nothing, P. apply sort_by_perm.
  - apply Forall_map, Forall_forall. intros b I. unfold is_even in V. rewrite forallb_forall in V. specialize (V b I).
    apply Nat.leb_le in V. unfold b_cost in V. rewrite andb_true_r. apply Nat.leb_le. lia.
  - unfold settled. rewrite settle_length. exact L.
Qed.

Lemma find_holds : forall units count bs, find units count = Some bs -> holds units (map b_group bs) /\ length bs = count.
Proof.
  intros units count bs. unfold find. destruct (spread_in units _) as [found|] eqn:S; intros E.
  - injection E as <-. apply spread_in_holds in S. rewrite repeat_length in S. exact S.
  - apply even_out_holds, E.
Qed.

Lemma bisect_holds : forall units count fuel low middle high found, holds units found -> holds units (bisect units count fuel low middle high found).
Proof.
  intros units count. induction fuel as [|fuel IH]; simpl; intros low middle high found H; [exact H|].
  destruct (low <? high); [|exact H]. destruct (find units (count middle)) as [bs|] eqn:E; apply IH; [|exact H]. apply find_holds in E. apply E.
Qed.

Theorem the_fewest_hold_exactly_the_units : forall units alone whole at_least, fit_alone units -> holds units (find_fewest units alone whole at_least).
Proof.
  assert (Filled : forall units gs, holds units gs -> holds units (filter is_filled gs)).
  { intros units gs [P R]. split; [rewrite filled_concat; exact P|]. apply Forall_forall. intros g I. apply filter_In in I.
    rewrite Forall_forall in R. apply R, I. }
  intros units alone whole at_least F. apply Filled, bisect_holds, pack_either_way_holds, F.
Qed.

(** Settling what was found. *)
Hypothesis near_some : 1 <= near.

(** No micro-batch is empty, or none has two units. *)
Definition is_filled_up (gs : list group) : Prop := Forall (fun g => g <> []) gs \/ Forall (fun g => length g <= 1) gs.

Definition cost_something (units : list sample) : Prop := Forall (fun x => 1 <= cost x) units.

Lemma settle_all_holds : forall units bs, holds units (map b_group bs) ->
  holds units (settle_all units bs) /\ length (settle_all units bs) = length bs.
Proof.
  intros units bs [P R]. apply Forall_map in R. unfold settle_all, settled. split; [split|].
  - eapply Permutation_trans; [exact (settling_loses_nothing cost room near None _ _ bs)|exact P].
  - apply Forall_map, settling_keeps_the_bounds, R.
  - rewrite map_length. apply settle_length.
Qed.

Lemma settle_all_fills : forall units gs, fit_alone units -> cost_something units -> holds units gs ->
  is_filled_up (settle_all units (as_batches gs)).
Proof.
  intros units gs F C [P R]. unfold is_filled_up, settle_all, as_batches. rewrite !Forall_map.
  apply settling_fills_what_is_empty; auto.
  - intros x g. apply room_of_part.
  - intros g h. apply roomy_perm.
  - apply Forall_map, Forall_forall. intros g I. split; [reflexivity|]. rewrite Forall_forall in R. split; [apply R, I|]. simpl.
    apply Forall_forall. intros x Ix. unfold fit_alone, cost_something in *. rewrite Forall_forall in F, C.
    assert (In x units) by (eapply Permutation_in; [exact P|]; apply in_concat; eauto). auto.
  - apply Forall_map, Forall_forall. reflexivity.
Qed.

Lemma divide_evenly_is : forall units fewest count, fit_alone units -> cost_something units -> holds units fewest -> length fewest <= count ->
  holds units (divide_evenly units fewest count) /\ length (divide_evenly units fewest count) = count /\ is_filled_up (divide_evenly units fewest count).
Proof.
  intros units fewest count F C H L.
  assert (S : exists gs, divide_evenly units fewest count = settle_all units (as_batches gs) /\ holds units gs /\ length gs = count).
  { unfold divide_evenly. destruct (spread_in units _) as [bs|] eqn:E.
    - apply spread_in_holds in E. rewrite repeat_length in E. eexists. split; [reflexivity|]. rewrite map_length. exact E.
    - destruct (if length fewest <? count then even_out units count else None) as [bs|] eqn:V.
      + destruct (length fewest <? count); [|discriminate]. apply even_out_holds in V. eexists. split; [reflexivity|]. rewrite map_length. exact V.
      + eexists. split; [reflexivity|]. rewrite app_length, repeat_length. split; [|lia]. destruct H as [P R]. split.
        * rewrite concat_app, concat_repeat_nil, app_nil_r. exact P.
        * apply Forall_app. split; [exact R|apply Forall_repeat, room_of_none]. }
  destruct S as [gs [-> [G Len]]]. destruct (settle_all_holds units (as_batches gs)) as [A B]; [unfold as_batches; rewrite map_map, map_id; exact G|].
  split; [exact A|]. split; [rewrite B; unfold as_batches; rewrite map_length; exact Len|]. apply settle_all_fills; assumption.
Qed.

Lemma divide_others_is : forall units fewest count starts, fit_alone units -> cost_something units -> holds units fewest -> length fewest <= count ->
  starts = [] \/ length starts = count -> let gs := divide_others units fewest count starts in
  holds units gs /\ length gs = count /\ is_filled_up gs.
Proof.
  intros units fewest count starts F C H L S. pose proof (divide_evenly_is units fewest count F C H L) as D. unfold divide_others.
  destruct (existsb _ _) eqn:X; [|exact D]. destruct S as [->|S]; [discriminate|].
  destruct (spread_in units starts) as [bs|] eqn:E; [|exact D]. destruct (forallb _ _) eqn:Nh; [|exact D].
  apply spread_in_holds in E. destruct E as [G Len]. destruct (settle_all_holds units bs G) as [A B]. split; [exact A|].
  split; [congruence|]. left. unfold settle_all, settled. apply Forall_map, settling_leaves_none_empty, Forall_forall.
  intros b I. rewrite forallb_forall in Nh. specialize (Nh (b_group b) (in_map _ _ _ I)). destruct (b_group b); discriminate.
Qed.

Lemma levels_length : forall ranks falling steps left, length (levels ranks falling steps left) = steps.
Proof.
  induction falling as [|f falling IH]; intros [|s] left; simpl; try reflexivity; [rewrite repeat_length; reflexivity|].
  destruct (_ <? _); simpl; [rewrite IH|rewrite repeat_length]; reflexivity.
Qed.

Lemma starts_length : forall units count ranks, length (starts_of units count ranks) = count / ranks * ranks.
Proof.
  intros units count ranks. unfold starts_of. set (found := levels ranks _ _ _).
  assert (L : length found = count / ranks) by apply levels_length. rewrite <- L. clearbody found. clear L. generalize (hd 0 found). intros top.
  induction found as [|level found IH]; simpl; [reflexivity|]. rewrite app_length, repeat_length, IH. reflexivity.
Qed.

(** A division into at least as many micro-batches as needed. Each unit is in one. None exceeds a bound, except a unit by itself. There is
    the number that was asked for. One is empty only if none has two units. *)
Theorem a_division_is_right : forall units fewest steps ranks, let count := steps * ranks in
  cost_something units -> holds (others units) fewest -> length (loners units) + length fewest <= count -> 1 <= ranks ->
  let gs := divide units fewest count ranks in
  Permutation (concat gs) units /\
  Forall (fun g => room g = true \/ exists x, g = [x] /\ room [x] = false) gs /\
  length gs = count /\ is_filled_up gs.
Proof.
  intros units fewest steps ranks count C H L R gs. unfold divide in gs.
  set (alone := loners units) in *. set (left := count - length alone) in *.
  set (starts := if (1 <? ranks) && (length alone =? 0) then starts_of units left ranks else []) in *.
  assert (Fo : fit_alone (others units)).
  { apply Forall_forall. intros x I. apply filter_In in I. apply I. }
  assert (Co : cost_something (others units)).
  { apply Forall_forall. intros x I. apply filter_In in I. unfold cost_something in C. rewrite Forall_forall in C. apply C, I. }
  assert (S : starts = [] \/ length starts = left).
  { unfold starts. destruct (1 <? ranks); simpl; [|auto]. destruct (length alone =? 0) eqn:Z; [|auto]. right. apply Nat.eqb_eq in Z.
    rewrite starts_length. unfold left. rewrite Z, Nat.sub_0_r. unfold count. rewrite Nat.div_mul by lia. reflexivity. }
  destruct (divide_others_is (others units) fewest left starts Fo Co H) as [[P Ro] [Len Fi]]; [unfold left; lia|exact S|].
  destruct (beside_loners room units _ gs P Ro (sort_by_perm _ _ _)) as [Q [Al [Ln Each]]]. fold (loners units) in Ln. fold alone in Ln.
  split; [exact Q|]. split; [exact Al|]. split; [rewrite Ln, Len; unfold left; lia|].
  destruct Fi as [Fi|Fi]; [left|right]; (apply Each; [|exact Fi]); intros x; [discriminate|simpl; lia].
Qed.
End Division.
