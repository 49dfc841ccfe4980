(** Dividing units into micro-batches of the padded layout, of odb_ref/plan/padding.py: into runs by rising length. The theorems hold for
    any cost of a row, and for units of any number of samples. Spec: R13.3, R13.4, R13.5. *)
Require Import List Arith Lia Permutation Bool.
From ODB Require Import Lists Types Alignment PlanSettling PlanDivision.
Import ListNotations.
Arguments Nat.div : simpl never.

(** ** The model *)

Section Padding.
(** The number of samples of a unit, whose longest has [len] tokens, and the cost of a row by its number of tokens. *)
Variables (rows : sample -> nat) (of : nat -> nat) (budget : nat) (limits : list nat).

Definition padded_room (g : group) : bool := (sum_over rows g * longest g <=? budget) && is_within limits g.

Definition charge (g : group) : nat := sum_over rows g * of (longest g).

Definition is_below (bound : option nat) (g : group) : bool := match bound with Some most => charge g <=? most | None => true end.

(** A run takes units while it keeps its bounds. It takes its first unit in any case. *)
Definition runs (bound : option nat) (l : list sample) : list group :=
  greedy (fun run x => let more := run ++ [x] in padded_room more && is_below bound more) [] l.

(** Sets apart the longest units, those that cost at least what the costliest run of the others then does. Returns their number, and the
    runs of the others. *)
Fixpoint set_apart (l : list sample) (count fuel apart beyond : nat) (found : list group) : nat * list group :=
  match fuel with
  | 0 => (apart, found)
  | S fuel =>
      if 1 <? beyond - apart then
        let middle := (apart + beyond) / 2 in
        let left := length l - middle in
        let tried := runs (Some (charge (firstn 1 (skipn left l)))) (firstn left l) in
        if length tried <=? count - middle then set_apart l count fuel middle beyond tried else set_apart l count fuel apart middle found
      else (apart, found)
  end.

(** Makes the costliest run as cheap as the bisection finds. *)
Fixpoint lower (l : list sample) (count fuel low high : nat) (found : list group) : list group :=
  match fuel with
  | 0 => found
  | S fuel =>
      if low <? high then
        let middle := (low + high) / 2 in
        let tried := runs (Some middle) l in
        if length tried <=? count then lower l count fuel low middle tried else lower l count fuel (S middle) high found
      else found
  end.

(** The number of units after which a run has [n] rows. *)
Fixpoint reached (n : nat) (g : group) : nat := match g with [] => 0 | x :: r => if n =? 0 then 0 else S (reached (n - rows x) r) end.

Definition halfway (g : group) : nat := Nat.min (Nat.max (reached ((sum_over rows g + 1) / 2) g) 1) (length g - 1).

Definition halvable (g : group) : nat := if 1 <? length g then charge g else 0.

Fixpoint halve_first (most : nat) (gs : list group) : list group :=
  match gs with
  | [] => []
  | g :: r => if halvable g =? most then firstn (halfway g) g :: skipn (halfway g) g :: r else g :: halve_first most r
  end.

(** Halves the costliest run of two or more units, [times] times or until there is none. *)
Fixpoint halve (times : nat) (gs : list group) : list group :=
  match times with
  | 0 => gs
  | S n => let most := list_max (map halvable gs) in if most =? 0 then gs else halve n (halve_first most gs)
  end.

Definition by_length : list sample -> list sample := sort_by (fun x y => len x <=? len y).

Definition singles (l : list sample) : list group := map (fun x => [x]) l.

Definition divide_runs (l : list sample) (count : nat) : list group :=
  let (apart, found) := set_apart l count (length l) 0 (Nat.min (length l) count) (runs None l) in
  let (others, longest) := (firstn (length l - apart) l, skipn (length l - apart) l) in
  let low := list_max (map charge (singles others)) in
  let high := list_max (map charge found) in
  let gs := lower others (count - apart) (high - low) low high found ++ singles longest in
  halve (count - length gs) gs.

Definition fitting (units : list sample) : list sample := by_length (filter (fun x => padded_room [x]) units).
Definition too_large (units : list sample) : list sample := filter (fun x => negb (padded_room [x])) units.

Definition need_padded (units : list sample) : nat := length (too_large units) + length (runs None (fitting units)).

Definition dearer (g h : group) : bool := (charge h <? charge g) || ((charge g =? charge h) && (first_of g <=? first_of h)).

(** The costliest first, empty ones last. *)
Definition divide_padded (units : list sample) (count : nat) : list group :=
  let alone := too_large units in
  let found := divide_runs (fitting units) (count - length alone) ++ singles alone in
  sort_by dearer found ++ repeat [] (count - length found).

(** ** Runs *)

Definition runs_ok (l : list sample) (gs : list group) : Prop := concat gs = l /\ Forall (fun g => g <> [] /\ padded_room g = true) gs.

Definition fit_padded (l : list sample) : Prop := Forall (fun x => padded_room [x] = true) l.

Lemma runs_are_ok : forall bound l, fit_padded l -> runs_ok l (runs bound l).
Proof.
  intros bound l F. split; [apply greedy_concat|]. apply (greedy_keeps _ _ _ l) with (before := []); auto.
  - intros x I. split; [discriminate|]. unfold fit_padded in F. rewrite Forall_forall in F. exact (F x I).
  - intros _ run x _ _ _ J. apply andb_true_iff in J as [J _]. split; [destruct run; discriminate|exact J].
Qed.

Lemma padded_room_parts : forall g h, padded_room (g ++ h) = true -> padded_room g = true /\ padded_room h = true.
Proof.
  intros g h. unfold padded_room. rewrite !andb_true_iff, !Nat.leb_le, sum_over_app, longest_app. intros [T W].
  split; (split; [|eapply is_within_le; [|exact W]; intros r; rewrite sum_over_app; lia]); (eapply Nat.le_trans; [apply Nat.mul_le_mono|exact T]); lia.
Qed.

Lemma singles_ok : forall l, fit_padded l -> runs_ok l (singles l).
Proof.
  intros l F. split; [apply singles_are|]. apply Forall_map. eapply Forall_impl; [|exact F]. intros x R. split; [discriminate|exact R].
Qed.

(** ** Both bisections *)

(** Runs of all units but the [apart] longest, few enough to leave a micro-batch for each of those. *)
Definition is_apart (l : list sample) (count apart : nat) (found : list group) : Prop :=
  runs_ok (firstn (length l - apart) l) found /\ length found <= count - apart /\ apart <= length l /\ apart <= count.

Lemma middle_between : forall n m, n < m -> n <= (n + m) / 2 < m /\ (1 < m - n -> n < (n + m) / 2).
Proof. intros n m L. pose proof (Nat.div_mod_eq (n + m) 2) as E. pose proof (Nat.mod_upper_bound (n + m) 2 ltac:(lia)). lia. Qed.

Lemma set_apart_is : forall l count, fit_padded l -> forall fuel apart beyond found, beyond <= length l -> beyond <= count ->
  is_apart l count apart found -> let (n, gs) := set_apart l count fuel apart beyond found in is_apart l count n gs.
Proof.
  intros l count F. induction fuel as [|fuel IH]; intros apart beyond found B C H; simpl; [exact H|].
  destruct (1 <? beyond - apart) eqn:L; [|exact H]. apply Nat.ltb_lt in L. pose proof (middle_between apart beyond ltac:(lia)).
  destruct (_ <=? _) eqn:E; apply IH; try lia; [|exact H]. apply Nat.leb_le in E.
  split; [apply runs_are_ok, Forall_firstn, F|]. lia.
Qed.

Lemma lower_is : forall l count, fit_padded l -> forall fuel low high found, runs_ok l found -> length found <= count ->
  runs_ok l (lower l count fuel low high found) /\ length (lower l count fuel low high found) <= count.
Proof.
  intros l count F. induction fuel as [|fuel IH]; intros low high found H L; simpl; [auto|]. destruct (low <? high); [|auto].
  destruct (_ <=? _) eqn:E; apply IH; auto; [apply runs_are_ok, F|apply Nat.leb_le, E].
Qed.

(** The bisections end: with more fuel they find the same. *)
Theorem setting_apart_ends : forall l count more fuel apart beyond found, beyond - apart <= fuel ->
  set_apart l count (fuel + more) apart beyond found = set_apart l count fuel apart beyond found.
Proof.
  intros l count more. induction fuel as [|fuel IH]; intros apart beyond found L.
  - destruct more; simpl; [reflexivity|]. replace (1 <? beyond - apart) with false; [reflexivity|]. symmetry. apply Nat.ltb_ge. lia.
  - simpl. destruct (1 <? beyond - apart) eqn:E; [|reflexivity]. apply Nat.ltb_lt in E. pose proof (middle_between apart beyond ltac:(lia)).
    destruct (_ <=? _); apply IH; lia.
Qed.

Theorem lowering_ends : forall l count more fuel low high found, high - low <= fuel ->
  lower l count (fuel + more) low high found = lower l count fuel low high found.
Proof.
  intros l count more. induction fuel as [|fuel IH]; intros low high found L.
  - destruct more; simpl; [reflexivity|]. replace (low <? high) with false; [reflexivity|]. symmetry. apply Nat.ltb_ge. lia.
  - simpl. destruct (low <? high) eqn:E; [|reflexivity]. apply Nat.ltb_lt in E.
    pose proof (middle_between low high E).
    destruct (_ <=? _); apply IH; lia.
Qed.

(** ** Halving *)

(** A row with at least one token costs something, and each unit has such a row. *)
Hypothesis of_some : forall n, 1 <= n -> 1 <= of n.

Definition have_rows (l : list sample) : Prop := Forall (fun x => 1 <= rows x /\ 1 <= len x) l.

Lemma charge_some : forall g, g <> [] -> have_rows g -> 1 <= charge g.
Proof.
  intros [|x g] Nh H; [contradiction|]. inversion H as [|? ? [R L] _]; subst. unfold charge. simpl.
  pose proof (of_some (Nat.max (len x) (longest g)) ltac:(lia)). nia.
Qed.

Lemma halve_first_is : forall l most gs, 1 <= most -> runs_ok l gs -> In most (map halvable gs) ->
  runs_ok l (halve_first most gs) /\ length (halve_first most gs) = S (length gs).
Proof.
  intros l most gs M. revert l. induction gs as [|g gs IH]; simpl; intros l [C F] I; [easy|]. inversion F as [|? ? [Nh R] G]; subst.
  destruct (halvable g =? most) eqn:E.
  - apply Nat.eqb_eq in E. unfold halvable in E. destruct (1 <? length g) eqn:L; [|lia]. apply Nat.ltb_lt in L.
    assert (Hw : 1 <= halfway g < length g) by (unfold halfway; lia).
    pose proof R as R'. rewrite <- (firstn_skipn (halfway g) g) in R'. apply padded_room_parts in R'. destruct R' as [Ra Rb].
    split; [split|reflexivity].
    + simpl. rewrite app_assoc, firstn_skipn. reflexivity.
    + constructor; [|constructor; [|exact G]]; (split; [|assumption]); intros Z; apply (f_equal (@length _)) in Z; simpl in Z;
        rewrite ?firstn_length, ?skipn_length in Z; lia.
  - apply Nat.eqb_neq in E. destruct I as [I|I]; [contradiction|]. destruct (IH (concat gs)) as [[P Q] L]; [split; auto|exact I|].
    split; [split|]; simpl; [congruence|constructor; auto|congruence].
Qed.

Lemma list_max_in : forall l, 1 <= list_max l -> In (list_max l) l.
Proof.
  induction l as [|x l IH]; simpl; [lia|]. intros L. destruct (Nat.max_spec x (list_max l)) as [[A ->]|[A ->]]; [right; apply IH; lia|auto].
Qed.

Lemma halve_is : forall times l gs, have_rows l -> runs_ok l gs -> let new := halve times gs in
  runs_ok l new /\ length new <= length gs + times /\ (length new = length gs + times \/ Forall (fun g => length g <= 1) new).
Proof.
  induction times as [|times IH]; intros l gs H R; simpl; [split; [exact R|lia]|].
  destruct (list_max (map halvable gs) =? 0) eqn:E.
  - apply Nat.eqb_eq in E. split; [exact R|]. split; [lia|right]. apply Forall_forall. intros g I.
    pose proof (proj1 (list_max_le (map halvable gs) 0) ltac:(lia)) as Z. rewrite Forall_forall in Z. specialize (Z (halvable g) (in_map _ _ _ I)).
    unfold halvable in Z. destruct (1 <? length g) eqn:L; [|apply Nat.ltb_ge in L; exact L]. apply Nat.ltb_lt in L.
    assert (1 <= charge g); [|lia]. apply charge_some; [destruct g; [simpl in L; lia|discriminate]|]. destruct R as [<- _].
    apply Forall_forall. unfold have_rows in H. rewrite Forall_forall in H. intros x Ix. apply H, in_concat. eauto.
  - apply Nat.eqb_neq in E. assert (M : 1 <= list_max (map halvable gs)) by lia.
    destruct (halve_first_is l _ gs M R (list_max_in _ M)) as [R' L].
    destruct (IH l _ H R') as [A [B C]]. rewrite L in B, C. split; [exact A|]. split; [lia|]. destruct C as [C|C]; [left; lia|right; exact C].
Qed.

(** ** A division *)

Lemma divide_runs_is : forall l count, fit_padded l -> have_rows l -> length (runs None l) <= count -> let gs := divide_runs l count in
  runs_ok l gs /\ length gs <= count /\ (length gs = count \/ Forall (fun g => length g <= 1) gs).
Proof.
  intros l count F H L gs. unfold gs, divide_runs.
  pose proof (set_apart_is l count F (length l) 0 (Nat.min (length l) count) (runs None l)) as A.
  destruct (set_apart _ _ _ _ _ _) as [apart found].
  destruct A as [R [Few [Al Ac]]]; [lia|lia|split; [rewrite Nat.sub_0_r, firstn_all; apply runs_are_ok, F|lia]|].
  set (low := list_max (map charge (singles _))). set (high := list_max _).
  destruct (lower_is (firstn (length l - apart) l) (count - apart) (Forall_firstn _ _ _ _ F) (high - low) low high found R Few) as [R' Few'].
  set (cut := _ ++ _). assert (Cut : runs_ok l cut /\ length cut <= count).
  { split; [|unfold cut, singles; rewrite app_length, map_length, skipn_length; lia].
    destruct R' as [P' F'], (singles_ok (skipn (length l - apart) l)) as [Q G]; [apply Forall_skipn, F|]. unfold cut.
    split; [rewrite concat_app, P', Q; apply firstn_skipn|apply Forall_app; auto]. }
  destruct Cut as [Cut Len]. destruct (halve_is (count - length cut) l cut H Cut) as [A [B C]].
  split; [exact A|]. split; [lia|]. destruct C as [C|C]; [left; lia|right; exact C].
Qed.

Theorem a_padded_division_is_right : forall units count, have_rows units -> need_padded units <= count ->
  let gs := divide_padded units count in
  Permutation (concat gs) units /\
  Forall (fun g => padded_room g = true \/ exists x, g = [x] /\ padded_room [x] = false) gs /\
  length gs = count /\ is_filled_up gs.
Proof.
  intros units count H L gs. unfold need_padded in L. unfold gs, divide_padded. set (alone := too_large units) in *. set (l := fitting units) in *.
  assert (Pl : Permutation l (filter (fun x => padded_room [x]) units)) by apply sort_by_perm.
  assert (Sub : forall P : sample -> Prop, (forall x, In x units -> padded_room [x] = true -> P x) -> Forall P l).
  { intros P A. eapply Forall_perm; [symmetry; exact Pl|]. apply Forall_forall. intros x I. apply filter_In in I as [I R]. auto. }
  assert (F : fit_padded l) by (apply Sub; auto).
  assert (Hl : have_rows l) by (unfold have_rows in *; rewrite Forall_forall in H; apply Sub; auto).
  destruct (divide_runs_is l (count - length alone) F Hl) as [[C R] [Few Fi]]; [lia|]. set (found := divide_runs l _) in *.
  assert (Filled : Forall (fun g => g <> []) found) by (eapply Forall_impl; [|exact R]; simpl; tauto).
  destruct (beside_loners padded_room units found (sort_by dearer (found ++ singles alone))) as [Q [Al [Ln Each]]];
    [rewrite C; exact Pl|eapply Forall_impl; [|exact R]; simpl; tauto|apply sort_by_perm|]. fold (too_large units) in Ln. fold alone in Ln.
  assert (La : length (found ++ singles alone) = length found + length alone) by (unfold singles; rewrite app_length, map_length; reflexivity).
  split; [rewrite concat_app, concat_repeat_nil, app_nil_r; exact Q|]. split; [apply Forall_app; split; [exact Al|]|split].
  - apply Forall_repeat. left. unfold padded_room, is_within. simpl. apply forallb_forall. intros [r limit] _. reflexivity.
  - rewrite app_length, repeat_length. lia.
  - destruct Fi as [Fi|Fi]; [left|right]; apply Forall_app; (split; [apply Each; [|assumption]|]).
    + discriminate.
    + replace (count - _) with 0 by lia. constructor.
    + simpl. lia.
    + apply Forall_repeat. simpl. lia.
Qed.
End Padding.
