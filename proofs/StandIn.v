(** R7.6: what stands in for a rank whose machine is lost. [stand_in] is make_stand_in of odb_ref/core/summary.py, on what
    compute_summary says of the state.

    Told that it has failed, it goes on as the rank itself would that has failed: the same events are possible, each leads to the same
    summary, and what it posts tells the same. What may differ in its posts, counts and the measures of an offer that fails, is
    released on no rank. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System.
Import ListNotations.

(** A step that is known by its number only. *)
Definition idle (rd : nat) (x : Machine.step) : Machine.step := mkStep (s_number x) rd [] zero_counts.

Definition stand_in (u : state) : state :=
  let steps := map (idle (round u - 1)) in
  mkState (at_phase u) (round u) 0 true 0 [] [] [] None (map (fun _ => []) (aligned u)) (steps (plan u)) (collated u) (planned u) (gsum u)
    (steps (outbox u)) (steps (queue u)) (steps (taken u)) (failure u) (stopped u) (urged u) (limit u) (ended_as u) (posted u).

(** What a message tells: of an offer that fails not its measures, of counts how many there are. *)
Definition told (m : msg) : msg :=
  match m with
  | MOffer o => match o_failed o with
                | Some q => MOffer (mkOffer (o_round_min o) (o_round_max o) (o_print_min o) (o_print_max o) true (Some q) (o_stop_step o) (o_stop_rank o) 0 0 None 0 0 None)
                | None => MOffer o
                end
  | MCounts cs => MCounts (map (fun _ => zero_counts) cs)
  | MReport x => MReport x
  end.

(** What others see of a rank: the summary, with the numbers of the steps, and what it has posted. *)
Definition face (u : state) :=
  ((at_phase u, round u, length (aligned u), collated u, planned u, gsum u),
   (map s_number (plan u), map s_number (outbox u), map s_number (queue u), map s_number (taken u)),
   (failure u, stopped u, urged u, limit u, ended_as u, option_map told (posted u))).

Fixpoint run (c : config) (r d : nat) (es : list event) (u : state) : option state :=
  match es with
  | [] => Some u
  | e :: later => match transition c r d u e with Some t => run c r d later t | None => None end
  end.

Definition is_read (e : event) : bool := match e with SamplesRead _ _ _ => true | _ => false end.

(** ** Two that look alike *)

Record twins (u v : state) : Prop := {
  tw_face : face u = face v;
  tw_failed : is_ending u = true \/ failure u <> None;
  tw_fill : at_phase u <> FILL }.

Lemma numbers_length : forall a b, map s_number a = map s_number b -> length a = length b.
Proof. intros a b H. rewrite <- (map_length s_number a), H. apply map_length. Qed.

Lemma take_room_alike : forall lim room a b, map s_number a = map s_number b ->
  map s_number (fst (take_room room lim a)) = map s_number (fst (take_room room lim b)) /\ map s_number (snd (take_room room lim a)) = map s_number (snd (take_room room lim b)).
Proof.
  intros lim. induction room as [|room IH]; intros [|x a] [|y b] H; simpl in H; try discriminate; try (split; auto; fail). injection H as Hx H. simpl. rewrite Hx.
  destruct (below lim (s_number y)); [|simpl; rewrite Hx, H; auto]. specialize (IH a b H). destruct (take_room room lim a), (take_room room lim b). simpl in *. destruct IH as [I1 I2]. rewrite Hx, I1, I2. auto.
Qed.

(** Deliveries, and the end of a drain. *)
Lemma deliver_alike : forall d u v, face u = face v -> face (deliver d u) = face (deliver d v).
Proof.
  intros d u v F. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  unfold deliver. rewrite <- (numbers_length _ _ F9), <- F14. pose proof (take_room_alike (limit u) (d - length (queue u)) _ _ F8) as [T1 T2].
  destruct (take_room (d - length (queue u)) (limit u) (outbox u)) as [x y], (take_room (d - length (queue u)) (limit u) (outbox v)) as [x' y']. simpl in T1, T2.
  unfold face. simpl. rewrite !map_app. congruence.
Qed.

Lemma finish_alike : forall u v, face u = face v -> face (finish_when_drained u) = face (finish_when_drained v).
Proof.
  intros u v F. pose proof F as F0. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  unfold finish_when_drained. destruct (outbox u) as [|x a] eqn:Ou, (outbox v) as [|y b] eqn:Ov; simpl in F8; try discriminate.
  - unfold face. simpl. rewrite Ou, Ov. simpl. congruence.
  - injection F8 as Fx Fa. rewrite Fx, F14. destruct (below (limit v) (s_number y)); [exact F0|]. unfold face. simpl. rewrite Ou, Ov. simpl. congruence.
Qed.

Lemma drain_alike : forall d o l u v, face u = face v -> face (drain d o l u) = face (drain d o l v).
Proof.
  intros d o l u v F. unfold drain. apply finish_alike, deliver_alike. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  unfold face. simpl. rewrite F14. congruence.
Qed.

Lemma post_elsewhere : forall c r u, at_phase u <> FILL -> post c r u = u.
Proof. intros c r u P. unfold post. destruct (at_phase u); congruence. Qed.

Lemma same_ending : forall u v, face u = face v -> is_ending u = is_ending v.
Proof. intros u v F. unfold face in F. injection F as F1. unfold is_ending. rewrite F1. reflexivity. Qed.

Lemma numbers_of_steps : forall gs cs n rd, map s_number (make_steps n rd gs cs) = seq n (Nat.min (length gs) (length cs)).
Proof. induction gs as [|g gs IH]; intros [|x cs] n rd; simpl; try reflexivity. rewrite IH. reflexivity. Qed.

Lemma nothing_counted : forall (gs hs : list group), length gs = length hs ->
  map (fun _ => zero_counts) (map count_group gs) = map (fun _ => zero_counts) (map count_group hs).
Proof. induction gs as [|g gs IH]; intros [|h hs] L; simpl in *; try discriminate; [reflexivity|]. f_equal. apply IH. congruence. Qed.

(** A rank that has failed and begins a round fails in it. *)
Lemma failing_post : forall c r u, at_phase u = FILL -> failure u <> None ->
  exists gs o, post c r u = set_phase OFFER (set_groups gs (set_posted (Some (MOffer o)) u)) /\ o_failed o = Some r /\
    told (MOffer o) = MOffer (mkOffer (round u) (round u) (c_print c) (c_print c) true (Some r) (if stopped u then Some (length (taken u)) else None)
      (if stopped u then Some r else None) 0 0 None 0 0 None).
Proof.
  intros c r u P F. unfold post. rewrite P. assert (M : must_end u = true) by (unfold must_end; destruct (failure u); [reflexivity|congruence]). rewrite M. simpl.
  do 2 eexists. split; [reflexivity|]. unfold told, compute_offer. simpl. destruct (failure u); [|congruence]. split; reflexivity.
Qed.

Ltac same_face := unfold face; simpl; congruence.

Lemma answer_alike : forall c r d u v x, config_ok c -> twins u v ->
  match transition c r d u (Got x), transition c r d v (Got x) with Some a, Some b => twins a b | None, None => True | _, _ => False end.
Proof.
  intros c r d u v x OK [F Fa Fi]. pose proof F as F0. unfold face in F0. injection F0 as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  simpl. rewrite <- F1. destruct x as [a|cs|rs]; destruct (at_phase u) eqn:P; try exact I.
  - assert (Ff : failure u <> None) by (destruct Fa as [Fa|Fa]; [unfold is_ending in Fa; rewrite P in Fa; discriminate|exact Fa]).
    unfold agree. destruct (is_bad a).
    { constructor; [|right; exact Ff|discriminate]. unfold face. simpl. rewrite F11, F2. congruence. }
    rewrite <- F2. destruct (negb _); [exact I|]. destruct (o_stop_rank a) as [q|].
    { constructor; [apply drain_alike; exact F| |]; match goal with |- context[drain ?d ?o ?l ?w] => destruct (drain_phase d o l w) as [X|X] end; try (left; unfold is_ending; rewrite X; reflexivity); rewrite X; discriminate. }
    destruct (negb _); [exact I|].
    assert (Rel : face (set_outbox (outbox u ++ plan u) (set_plan [] (set_groups [] u))) = face (set_outbox (outbox v ++ plan v) (set_plan [] (set_groups [] v)))).
    { unfold face. simpl. rewrite !map_app. congruence. }
    destruct (target c a) as [|n].
    { rewrite <- F5. constructor; [apply drain_alike; exact Rel| |]; match goal with |- context[drain ?d ?o ?l ?w] => destruct (drain_phase d o l w) as [X|X] end; try (left; unfold is_ending; rewrite X; reflexivity); rewrite X; discriminate. }
    pose proof (ok_align_length _ OK (round u) (groups u) (S n) (due_before c u)) as L1. pose proof (ok_align_length _ OK (round u) (groups v) (S n) (due_before c v)) as L2.
    destruct (c_align c (round u) (groups u) (S n) (due_before c u)) as [al ca], (c_align c (round u) (groups v) (S n) (due_before c v)) as [al' ca']. simpl in L1, L2.
    constructor.
    + apply deliver_alike. pose proof (nothing_counted al al' ltac:(congruence)) as Nc. unfold face. simpl. rewrite !map_app, Nc. congruence.
    + right. match goal with |- failure (deliver d ?w) <> None => destruct (deliver_eq d w) as [x [y [_ [-> _]]]] end. exact Ff.
    + match goal with |- at_phase (deliver d ?w) <> FILL => destruct (deliver_same d w) as [-> _] end. discriminate.
  - assert (Ff : failure u <> None) by (destruct Fa as [Fa|Fa]; [unfold is_ending in Fa; rewrite P in Fa; discriminate|exact Fa]).
    unfold count. rewrite <- F3. destruct (negb (length cs =? length (aligned u))) eqn:L; [exact I|]. apply negb_false_iff, Nat.eqb_eq in L. rewrite <- F2, <- F5, <- F6.
    match goal with |- twins (post c r ?a) (post c r ?b) => set (a0 := a); set (b0 := b) end.
    destruct (failing_post c r a0 eq_refl Ff) as [gs [o [-> [_ To]]]]. destruct (failing_post c r b0 eq_refl ltac:(change (failure v <> None); congruence)) as [hs [p [-> [_ Tp]]]].
    constructor; [|right; exact Ff|discriminate]. unfold a0, b0 in *. cbn [round stopped taken set_phase set_round set_window set_aligned set_plan set_collated set_planned set_gsum] in To, Tp.
    assert (To' : told (MOffer o) = told (MOffer p)) by (rewrite To, Tp, F12, (numbers_length _ _ F10); reflexivity). clear To Tp.
    unfold face. cbn [at_phase round aligned collated planned gsum plan outbox queue taken failure stopped urged limit ended_as posted option_map set_phase set_round set_window set_aligned set_plan set_collated set_planned set_gsum set_groups set_posted].
    rewrite !numbers_of_steps, !firstn_length, <- F3, To'. congruence.
  - destruct (failure_of rs); [|exact I]. rewrite <- F5, <- (numbers_length _ _ F7).
    constructor; [apply drain_alike; exact F| |]; match goal with |- context[drain ?d ?o ?l ?w] => destruct (drain_phase d o l w) as [X|X] end; try (left; unfold is_ending; rewrite X; reflexivity); rewrite X; discriminate.
Qed.

Lemma event_alike : forall c r d u v e, config_ok c -> twins u v -> is_read e = false ->
  match transition c r d u e, transition c r d v e with Some a, Some b => twins a b | None, None => True | _, _ => False end.
Proof.
  intros c r d u v e OK T NR. destruct e as [xs en full| |x| | |cause|]; try discriminate; [|apply answer_alike; assumption| | | |];
    destruct T as [F Fa Fi]; pose proof F as F0; unfold face in F0; injection F0 as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16;
    assert (Fv : at_phase v <> FILL) by congruence; simpl.
  - rewrite <- F4. destruct (collated u); [exact I|]. rewrite !post_elsewhere by (simpl; assumption). constructor; [same_face|exact Fa|exact Fi].
  - destruct (queue u) as [|x q] eqn:Qu, (queue v) as [|y p] eqn:Qv; simpl in F9; try discriminate; [exact I|]. injection F9 as Fx Fq. rewrite Fx, F14. destruct (below (limit v) (s_number y)); [|exact I].
    set (a := set_taken (taken u ++ [x]) (set_queue q u)). set (b := set_taken (taken v ++ [y]) (set_queue p v)).
    assert (E : face a = face b) by (unfold face, a, b; simpl; rewrite !map_app; simpl; congruence). pose proof (deliver_alike d a b E) as D.
    destruct (deliver_same d a) as [Pa _]. destruct (deliver_same d b) as [Pb _]. change (at_phase a) with (at_phase u) in Pa. change (at_phase b) with (at_phase v) in Pb.
    assert (Fd : failure (deliver d a) = failure u) by (destruct (deliver_eq d a) as [z [w [_ [-> _]]]]; reflexivity).
    rewrite Pa, Pb, <- F1. destruct (at_phase u) eqn:P; [congruence| | | | |]; try (rewrite !post_elsewhere by (rewrite ?Pa, ?Pb; congruence);
      constructor; [exact D|unfold is_ending in *; rewrite P in Fa; rewrite Pa, Fd; exact Fa|rewrite Pa; discriminate]).
    constructor; [apply finish_alike, D|left|]; destruct (finish_eq (deliver d a)) as [k [-> [-> | ->]]]; unfold is_ending; simpl; rewrite ?Pa; try reflexivity; discriminate.
  - change (at_phase (set_limit _ (set_stopped true u))) with (at_phase u). change (at_phase (set_limit _ (set_stopped true v))) with (at_phase v).
    rewrite <- F1, <- F12, <- F14, <- (numbers_length _ _ F10).
    assert (T : forall l, face (set_limit l (set_stopped true u)) = face (set_limit l (set_stopped true v))) by (intros l; same_face).
    destruct (at_phase u) eqn:P; [congruence| | | | |]; try (constructor; [exact F|exact Fa|congruence]);
      (destruct (stopped u); [constructor; [exact F|exact Fa|congruence]|]);
      try (rewrite !post_elsewhere by (simpl; congruence); constructor; [apply T|unfold is_ending in *; simpl; rewrite P in *; exact Fa|simpl; congruence]).
    match goal with |- twins (finish_when_drained ?a) (finish_when_drained ?b) => constructor; [apply finish_alike, T|left|]; destruct (finish_eq a) as [k [-> [-> | ->]]] end;
      unfold is_ending; simpl; rewrite ?P; try reflexivity; discriminate.
  - rewrite <- (same_ending u v F), <- F11. assert (X : is_ending u || is_some (failure u) = true) by (apply orb_true_iff; destruct Fa as [Fa|Fa]; [left; exact Fa|right; destruct (failure u); [reflexivity|congruence]]).
    rewrite X. constructor; assumption.
  - rewrite <- (same_ending u v F). destruct (is_ending u) eqn:E; [constructor; auto|]. rewrite !post_elsewhere by (simpl; assumption). constructor; [same_face| |exact Fi].
    destruct Fa as [Fa|Fa]; [congruence|right; exact Fa].
Qed.

Lemma run_alike : forall c r d es u v, config_ok c -> twins u v -> forallb (fun e => negb (is_read e)) es = true ->
  option_map face (run c r d es u) = option_map face (run c r d es v).
Proof.
  intros c r d. induction es as [|e es IH]; intros u v OK T NR; simpl in *; [rewrite (tw_face _ _ T); reflexivity|]. apply andb_true_iff in NR as [N1 N2]. apply negb_true_iff in N1.
  pose proof (event_alike c r d u v e OK T N1) as E. destruct (transition c r d u e), (transition c r d v e); try contradiction; [apply IH; assumption|reflexivity].
Qed.

Lemma stand_in_face : forall u, face (stand_in u) = face u.
Proof. intros u. unfold face, stand_in. simpl. rewrite !map_map, map_length. reflexivity. Qed.

Lemma told_of_a_failure : forall c r d u cause, tight d u ->
  exists a b, transition c r d (stand_in u) (LocalFailed cause) = Some a /\ transition c r d u (LocalFailed cause) = Some b /\ twins a b.
Proof.
  intros c r d u cause T. pose proof (stand_in_face u) as F. simpl. change (is_ending (stand_in u)) with (is_ending u).
  destruct (is_ending u || is_some (failure u)) eqn:E.
  - exists (stand_in u), u. split; [reflexivity|]. split; [reflexivity|]. apply orb_true_iff in E. constructor; [exact F| |].
    + destruct E as [E|E]; [left; exact E|right; simpl; destruct (failure u); [discriminate|discriminate]].
    + simpl. intros P. destruct (t_fill _ _ T P) as [M _]. unfold must_end in M. apply orb_false_iff in M as [M _]. rewrite M in E. unfold is_ending in E. rewrite P in E. destruct E; discriminate.
  - do 2 eexists. split; [reflexivity|]. split; [reflexivity|]. set (a := set_failure (Some cause) (stand_in u)). set (b := set_failure (Some cause) u).
    assert (Fab : face a = face b) by (unfold face in *; simpl in *; congruence). destruct (at_phase u) eqn:P;
      try (rewrite !post_elsewhere by (simpl; congruence); constructor; [exact Fab|right; discriminate|simpl; congruence]).
    destruct (failing_post c r a P ltac:(discriminate)) as [gs [o [-> [_ To]]]]. destruct (failing_post c r b P ltac:(discriminate)) as [hs [p [-> [_ Tp]]]].
    constructor; [|right; discriminate|discriminate]. simpl in To, Tp. rewrite map_length in To. unfold face. cbn [at_phase round aligned collated planned gsum plan outbox queue taken failure stopped urged limit ended_as posted option_map set_phase set_groups set_posted].
    assert (E2 : told (MOffer o) = told (MOffer p)) by (simpl; rewrite To, Tp; reflexivity). rewrite E2. unfold face in Fab. congruence.
Qed.

(** Whatever happens then, but that the rank reads: each event is possible for both or for neither, and both look alike. *)
Theorem a_stand_in_goes_on_as_the_rank_that_failed : forall c r d u cause es, config_ok c -> tight d u -> forallb (fun e => negb (is_read e)) es = true ->
  option_map face (run c r d (LocalFailed cause :: es) (stand_in u)) = option_map face (run c r d (LocalFailed cause :: es) u).
Proof.
  intros c r d u cause es OK T NR. destruct (told_of_a_failure c r d u cause T) as [a [b [Ea [Eb Tw]]]]. cbn [run]. rewrite Ea, Eb. apply run_alike; assumption.
Qed.
