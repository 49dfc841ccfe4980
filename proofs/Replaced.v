(** R7.6, of a whole job: ranks whose machines are lost, one or more, each at its moment, and whose stand-ins go on.

    A run with stand-ins is followed by one without, in which those ranks fail at those moments. Up to the first counts that
    differ, since a stand-in counts nothing, all others do the very same. From then on ([uneven]) they may plan something else, but
    the round after fails in both runs, so that nothing of it is released; and what is released, taken and told stays the same. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled StandIn.
Import ListNotations.

(** ** One rank *)

(** A stand-in reads nothing. *)
Definition quiet (u : state) : Prop := ended u = true /\ wanted u = 0.

Lemma quiet_post : forall c r u, quiet u -> quiet (post c r u).
Proof. intros c r u Q. destruct (post_eq c r u) as [[-> _]|[_ [_ ->]]]; exact Q. Qed.
Lemma quiet_deliver : forall d u, quiet u -> quiet (deliver d u).
Proof. intros d u Q. destruct (deliver_eq d u) as [a [b [_ [-> _]]]]. exact Q. Qed.
Lemma quiet_finish : forall u, quiet u -> quiet (finish_when_drained u).
Proof. intros u Q. destruct (finish_eq u) as [p [-> _]]. exact Q. Qed.
Lemma quiet_drain : forall d o l u, quiet u -> quiet (drain d o l u).
Proof. intros d o l u Q. unfold drain. apply quiet_finish, quiet_deliver. exact Q. Qed.

Lemma quiet_stays : forall c r d u e t, transition c r d u e = Some t -> quiet u -> quiet t /\ is_read e = false.
Proof.
  intros c r d u e t E Q. pose proof Q as [Q1 Q2]. destruct e as [xs en full| |x| | |cause|]; simpl in E; simpl.
  - rewrite Q2 in E. discriminate.
  - split; [|reflexivity]. destruct (collated u); [discriminate|]. injection E as <-. apply quiet_post. exact Q.
  - split; [|reflexivity]. destruct x as [a|cs|rs]; destruct (at_phase u); try discriminate.
    + unfold agree in E. destruct (is_bad a); [injection E as <-; exact Q|]. destruct (negb _); [discriminate|]. destruct (o_stop_rank a); [injection E as <-; apply quiet_drain; exact Q|].
      destruct (negb _); [discriminate|]. destruct (target c a); [injection E as <-; apply quiet_drain; exact Q|]. destruct (c_align _ _ _ _ _). injection E as <-. apply quiet_deliver.
      split; simpl; [exact Q1|rewrite Q1; reflexivity].
    + unfold count in E. destruct (negb _); [discriminate|]. injection E as <-. apply quiet_post. exact Q.
    + destruct (failure_of rs); [|discriminate]. injection E as <-. apply quiet_drain. exact Q.
  - split; [|reflexivity]. destruct (queue u); [discriminate|]. destruct (below _ _); [|discriminate]. injection E as <-. set (w := deliver d _).
    assert (Qw : quiet w) by (apply quiet_deliver; exact Q). destruct (at_phase w); try (apply quiet_post; exact Qw). apply quiet_finish, Qw.
  - split; [|reflexivity]. change (at_phase (set_limit _ _)) with (at_phase u) in E.
    destruct (at_phase u); try (injection E as <-; exact Q); (destruct (stopped u); injection E as <-; [exact Q|]); try (apply quiet_post; exact Q). apply quiet_finish. exact Q.
  - split; [|reflexivity]. destruct (_ || _); injection E as <-; [exact Q|apply quiet_post; exact Q].
  - split; [|reflexivity]. destruct (is_ending u); injection E as <-; [exact Q|apply quiet_post; exact Q].
Qed.

(** Where a rank does not fill its window, nothing but an answer makes it post. *)
Lemma moves_on : forall c r d u e t, (forall x, e <> Got x) -> transition c r d u e = Some t -> at_phase u <> FILL ->
  posted t = posted u /\ (at_phase t = at_phase u \/ (at_phase u = DRAIN /\ at_phase t = DONE)).
Proof.
  intros c r d u e t NG E P.
  assert (F : forall w, posted w = posted u -> at_phase w = at_phase u -> at_phase u = DRAIN -> posted (finish_when_drained w) = posted u /\ (at_phase (finish_when_drained w) = at_phase u \/ (at_phase u = DRAIN /\ at_phase (finish_when_drained w) = DONE))).
  { intros w W1 W2 W3. destruct (finish_eq w) as [p [-> [-> | ->]]]; simpl; auto. }
  destruct e as [xs en full| |x| | |cause|]; simpl in E.
  - destruct (_ || _); [discriminate|]. injection E as <-. rewrite post_elsewhere by exact P. auto.
  - destruct (collated u); [discriminate|]. injection E as <-. rewrite post_elsewhere by exact P. auto.
  - exfalso. eapply NG. reflexivity.
  - destruct (queue u) as [|x q]; [discriminate|]. destruct (below _ _); [|discriminate]. injection E as <-. destruct (deliver_same d (set_taken (taken u ++ [x]) (set_queue q u))) as [D1 [D2 _]].
    simpl in D1, D2. destruct (at_phase (deliver d _)) eqn:Pd; try (rewrite post_elsewhere by congruence; split; [exact D2|left; congruence]). apply F; congruence.
  - change (at_phase (set_limit _ _)) with (at_phase u) in E.
    destruct (at_phase u) eqn:Pu; try (injection E as <-; auto); (destruct (stopped u); injection E as <-; [auto|]); try (rewrite post_elsewhere by (simpl; congruence); simpl; auto).
    try rewrite Pu in F. apply F; simpl; auto.
  - destruct (_ || _); injection E as <-; [auto|]. rewrite post_elsewhere by exact P. auto.
  - destruct (is_ending u); injection E as <-; [auto|]. rewrite post_elsewhere by exact P. auto.
Qed.

(** What stays the same of a rank when counts have differed. *)
Definition rim (u : state) :=
  ((at_phase u, round u, length (aligned u), collated u, planned u - length (plan u)),
   (map s_number (outbox u), map s_number (queue u), map s_number (taken u)), (failure u, stopped u, urged u, limit u, ended_as u)).

Record uneven (u v : state) : Prop := {
  un_rim : rim u = rim v;
  un_count : at_phase u <> COUNT;
  un_offer : at_phase u = OFFER -> exists o o', posted u = Some (MOffer o) /\ posted v = Some (MOffer o');
  un_report : at_phase u = REPORT -> posted u = posted v }.

Definition same_hands (u v : state) : Prop :=
  outbox u = outbox v /\ queue u = queue v /\ taken u = taken v /\ wanted u = wanted v /\ ended u = ended v /\ read u = read v.

(** A stand-in has failed; any other rank has the same steps in its hands. *)
Definition kept (stood : bool) (u v : state) : Prop :=
  if stood then quiet u /\ (is_ending u = true \/ failure u <> None) /\ at_phase u <> FILL else same_hands u v.

Definition even (stood : bool) (u v : state) : Prop := if stood then twins u v /\ quiet u else u = v.

Lemma even_kept : forall b u v, even b u v -> face u = face v /\ kept b u v.
Proof. intros [] u v E; simpl in *; [destruct E as [[F Fa Fi] Q]; auto|subst v; split; [reflexivity|repeat split]]. Qed.

Ltac rims F := unfold rim in F; injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13.

Lemma rim_deliver : forall d u v, rim u = rim v -> rim (deliver d u) = rim (deliver d v).
Proof.
  intros d u v F. rims F. unfold deliver. rewrite <- (numbers_length _ _ F7), <- F12. pose proof (take_room_alike (limit u) (d - length (queue u)) _ _ F6) as [T1 T2].
  destruct (take_room (d - length (queue u)) (limit u) (outbox u)) as [x y], (take_room (d - length (queue u)) (limit u) (outbox v)) as [x' y']. simpl in T1, T2.
  unfold rim. simpl. rewrite !map_app. congruence.
Qed.

Lemma rim_finish : forall u v, rim u = rim v -> rim (finish_when_drained u) = rim (finish_when_drained v).
Proof.
  intros u v F. pose proof F as F0. rims F. unfold finish_when_drained. destruct (outbox u) as [|x a] eqn:Ou, (outbox v) as [|y b] eqn:Ov; simpl in F6; try discriminate.
  - unfold rim. simpl. rewrite Ou, Ov. simpl. congruence.
  - injection F6 as Fx Fa. rewrite Fx, F12. destruct (below (limit v) (s_number y)); [exact F0|]. unfold rim. simpl. rewrite Ou, Ov. simpl. congruence.
Qed.

Lemma hands_deliver : forall d u v, same_hands u v -> limit u = limit v -> same_hands (deliver d u) (deliver d v).
Proof.
  intros d u v [H1 [H2 [H3 [H4 [H5 H6]]]]] L. unfold deliver. rewrite <- H1, <- H2, <- L. destruct (take_room _ _ _) as [x y]. unfold same_hands. simpl. rewrite H2. auto 10.
Qed.

Lemma hands_finish : forall u v, same_hands u v -> same_hands (finish_when_drained u) (finish_when_drained v).
Proof. intros u v H. destruct (finish_eq u) as [p [-> _]], (finish_eq v) as [q [-> _]]. exact H. Qed.

Lemma kept_deliver : forall b d u v, limit u = limit v -> kept b u v -> kept b (deliver d u) (deliver d v).
Proof.
  intros [] d u v L K; simpl in *; [|apply hands_deliver; assumption]. destruct K as [Q [F P]]. split; [apply quiet_deliver, Q|]. destruct (deliver_eq d u) as [x [y [_ [-> _]]]]. auto.
Qed.

Lemma kept_finish : forall b u v, at_phase u = DRAIN -> kept b u v -> kept b (finish_when_drained u) (finish_when_drained v).
Proof.
  intros [] u v P K; simpl in *; [|apply hands_finish; assumption]. destruct K as [Q [F Nf]]. split; [apply quiet_finish, Q|].
  destruct (finish_eq u) as [p [-> [-> | ->]]]; unfold is_ending; simpl; rewrite ?P; split; auto; discriminate.
Qed.

Lemma uneven_post : forall c r b u v, uneven u v -> kept b u v -> uneven (post c r u) (post c r v) /\ kept b (post c r u) (post c r v).
Proof.
  intros c r b u v [R C O P] K. pose proof R as F. rims F. destruct (at_phase u) eqn:Ph; try (rewrite !post_elsewhere by congruence; split; [constructor; rewrite ?Ph; auto|exact K]).
  destruct b; simpl in K; [destruct K as [_ [_ K]]; congruence|]. destruct K as [H1 [H2 [H3 [H4 [H5 H6]]]]].
  unfold post. rewrite <- F1, Ph. assert (Me : must_end v = must_end u) by (unfold must_end; congruence). assert (Rd : is_ready v = is_ready u) by (unfold is_ready; congruence).
  rewrite Me, Rd, <- H1, <- F11. destruct (must_end u || is_ready u && (is_nil (outbox u) || urged u)).
  - split; [|repeat split; assumption]. constructor; simpl; try discriminate; [|eauto]. unfold rim. simpl. congruence.
  - split; [constructor; rewrite ?Ph; auto; discriminate|repeat split; assumption].
Qed.

Lemma uneven_event : forall c r d b u v e a, uneven u v -> kept b u v -> (forall x, e <> Got x) -> (forall xs en, e <> SamplesRead xs en true) -> transition c r d u e = Some a ->
  exists w, transition c r d v e = Some w /\ uneven a w /\ kept b a w.
Proof.
  intros c r d b u v e a U K NG NF E. pose proof U as [R C O P]. pose proof R as F. rims F. destruct e as [xs en full| |x| | |cause|]; simpl in E; simpl.
  - assert (full = false) by (destruct full; [exfalso; eapply NF; reflexivity|reflexivity]). subst full. simpl in *. rewrite !orb_false_r, ?andb_true_r in *. destruct b; simpl in K; [destruct K as [[_ Q] _]; rewrite Q in E; discriminate|]. pose proof K as [H1 [H2 [H3 [H4 [H5 H6]]]]]. rewrite <- H4. destruct (_ || _); [discriminate|]. injection E as <-.
    eexists. split; [reflexivity|]. apply (uneven_post c r false); [constructor; simpl; auto; unfold rim; simpl; congruence|]. unfold kept, same_hands. simpl. rewrite H6. auto 10.
  - rewrite <- F4. destruct (collated u); [discriminate|]. injection E as <-. eexists. split; [reflexivity|]. apply uneven_post; [constructor; simpl; auto; unfold rim; simpl; congruence|]. destruct b; exact K.
  - exfalso. eapply NG. reflexivity.
  - destruct (queue u) as [|x q] eqn:Qu, (queue v) as [|y p] eqn:Qv; simpl in F7; try discriminate. injection F7 as Fx Fq. rewrite <- Fx, <- F12. destruct (below _ _); [|discriminate]. injection E as <-.
    set (a0 := set_taken (taken u ++ [x]) (set_queue q u)). set (b0 := set_taken (taken v ++ [y]) (set_queue p v)).
    assert (Ra : rim a0 = rim b0) by (unfold rim, a0, b0; simpl; rewrite !map_app; simpl; congruence).
    assert (Ka : kept b a0 b0). { destruct b; [exact K|]. destruct K as [H1 [H2 [H3 [H4 [H5 H6]]]]]. rewrite Qu, Qv in H2. injection H2 as -> ->. unfold kept, same_hands, a0, b0. simpl. rewrite H3. auto 10. }
    pose proof (rim_deliver d _ _ Ra) as Rd. pose proof (kept_deliver b d a0 b0 F12 Ka) as Kd.
    destruct (deliver_same d a0) as [Pa [Oa _]]. destruct (deliver_same d b0) as [Pb [Ob _]]. change (at_phase a0) with (at_phase u) in Pa. change (at_phase b0) with (at_phase v) in Pb. change (posted a0) with (posted u) in Oa. change (posted b0) with (posted v) in Ob.
    assert (Ud : uneven (deliver d a0) (deliver d b0)) by (constructor; rewrite ?Pa, ?Oa, ?Ob; assumption).
    rewrite Pb, <- F1. rewrite Pa. destruct (at_phase u) eqn:Ph; try (eexists; split; [reflexivity|apply uneven_post; assumption]).
    eexists. split; [reflexivity|]. split; [|apply kept_finish; assumption]. constructor; [apply rim_finish, Rd| | |]; destruct (finish_eq (deliver d a0)) as [k [-> [-> | ->]]]; simpl; rewrite ?Pa; discriminate.
  - change (at_phase (set_limit _ (set_stopped true u))) with (at_phase u) in E. change (at_phase (set_limit _ (set_stopped true v))) with (at_phase v).
    rewrite <- F1, <- F10, <- F12, <- (numbers_length _ _ F8). set (l := match limit u with Some m => Nat.min m (length (taken u)) | None => length (taken u) end) in *.
    assert (T : uneven (set_limit (Some l) (set_stopped true u)) (set_limit (Some l) (set_stopped true v))) by (constructor; simpl; auto; unfold rim; simpl; congruence).
    assert (Kt : kept b (set_limit (Some l) (set_stopped true u)) (set_limit (Some l) (set_stopped true v))) by (destruct b; exact K).
    destruct (at_phase u) eqn:Ph; try (injection E as <-; eexists; split; [reflexivity|split; assumption]); (destruct (stopped u); injection E as <-; [eexists; split; [reflexivity|split; assumption]|]);
      try (eexists; split; [reflexivity|apply uneven_post; assumption]).
    eexists. split; [reflexivity|]. split; [|apply kept_finish; assumption]. constructor; [apply rim_finish, (un_rim _ _ T)| | |];
      match goal with |- context[finish_when_drained ?z] => destruct (finish_eq z) as [k [-> [-> | ->]]] end; simpl; rewrite ?Ph; discriminate.
  - assert (Ie : is_ending v = is_ending u) by (unfold is_ending; rewrite F1; reflexivity). rewrite Ie, <- F9. destruct (is_ending u || is_some (failure u)) eqn:Z; injection E as <-; [exists v; auto|].
    eexists. split; [reflexivity|]. apply uneven_post; [constructor; simpl; auto; unfold rim; simpl; congruence|]. destruct b; [|exact K]. destruct K as [Q [Fa Fi]]. split; [exact Q|]. split; [right; discriminate|exact Fi].
  - assert (Ie : is_ending v = is_ending u) by (unfold is_ending; rewrite F1; reflexivity). rewrite Ie. destruct (is_ending u) eqn:Z; injection E as <-; [exists v; auto|].
    eexists. split; [reflexivity|]. apply uneven_post; [constructor; simpl; auto; unfold rim; simpl; congruence|]. destruct b; [|exact K]. destruct K as [Q [Fa Fi]]. split; [exact Q|]. split; [|exact Fi]. right. destruct Fa as [Fa|Fa]; [congruence|exact Fa].
Qed.

(** ** Answers *)

Lemma rim_drain : forall d o l u v, rim u = rim v -> rim (drain d o l u) = rim (drain d o l v).
Proof. intros d o l u v F. unfold drain. apply rim_finish, rim_deliver. rims F. unfold rim. simpl. rewrite F12. congruence. Qed.

Lemma kept_drain : forall b d o l u v, limit u = limit v -> kept b u v -> kept b (drain d o l u) (drain d o l v).
Proof.
  intros b d o l u v L K. unfold drain. apply kept_finish.
  - match goal with |- at_phase (deliver d ?w) = _ => destruct (deliver_same d w) as [-> _] end. reflexivity.
  - apply kept_deliver; [simpl; rewrite L; reflexivity|]. rewrite <- L. destruct b; [|exact K]. destruct K as [Q _]. split; [exact Q|]. split; [left; reflexivity|discriminate].
Qed.

(** Two agreements that are bad, or the same reports, lead what is uneven to what is uneven; and nothing is released. *)
Definition ends_both (x x' : result) : Prop :=
  (exists a a', x = Agreed a /\ x' = Agreed a' /\ is_bad a = true /\ is_bad a' = true) \/ (exists rs, x = Reported rs /\ x' = Reported rs).

Lemma uneven_answer : forall c r d b u v x x' a, uneven u v -> kept b u v -> ends_both x x' -> transition c r d u (Got x) = Some a ->
  exists w, transition c r d v (Got x') = Some w /\ uneven a w /\ kept b a w /\ (at_phase a = REPORT \/ is_ending a = true).
Proof.
  intros c r d b u v x x' a U K X E. pose proof U as [R C O P]. pose proof R as F. rims F. destruct X as [[g [g' [-> [-> [B B']]]]]|[rs [-> ->]]]; simpl in E; simpl.
  - rewrite <- F1. destruct (at_phase u) eqn:Ph; try discriminate. unfold agree in *. rewrite B in E. rewrite B'. injection E as <-. eexists. split; [reflexivity|]. split; [|split; [|left; reflexivity]].
    + constructor; simpl; try discriminate; [unfold rim; simpl; congruence|]. intros _. rewrite F9, F2. reflexivity.
    + destruct b; [|exact K]. destruct K as [Q [Fa Fi]]. split; [exact Q|]. split; [right|discriminate]. destruct Fa as [Fa|Fa]; [unfold is_ending in Fa; rewrite Ph in Fa; discriminate|exact Fa].
  - rewrite <- F1. destruct (at_phase u) eqn:Ph; try discriminate. destruct (failure_of rs) as [o|]; [|discriminate]. injection E as <-. rewrite <- F5. eexists. split; [reflexivity|].
    destruct (drain_phase d o (planned u - length (plan u)) u) as [X|X]; (split; [constructor; [apply rim_drain, R| | |]; rewrite X; discriminate|]; split; [apply kept_drain; assumption|right; unfold is_ending; rewrite X; reflexivity]).
Qed.

(** Counts that differ make what was even uneven; a rank that has failed then fails in both. *)
Definition fails (u v : state) : Prop := exists o o' q, posted u = Some (MOffer o) /\ posted v = Some (MOffer o') /\ o_failed o = Some q /\ o_failed o' = Some q.

Lemma count_uneven : forall c r d b u v cs cs' a, face u = face v -> kept b u v -> length cs = length cs' -> transition c r d u (Got (Counted cs)) = Some a -> plan u = [] ->
  exists w, transition c r d v (Got (Counted cs')) = Some w /\ uneven a w /\ kept b a w /\ (failure u <> None -> fails a w).
Proof.
  intros c r d b u v cs cs' a F0 K L E Pl. pose proof F0 as F. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  simpl in E. simpl. rewrite <- F1. destruct (at_phase u) eqn:Ph; try discriminate. unfold count in *. rewrite <- F3, <- L. destruct (negb (length cs =? length (aligned u))) eqn:Le; [discriminate|]. apply negb_false_iff, Nat.eqb_eq in Le.
  injection E as <-. eexists. split; [reflexivity|]. rewrite <- F2, <- F5, <- F6.
  match goal with |- uneven (post c r ?a) (post c r ?b) /\ _ => set (a0 := a); set (b0 := b) end.
  assert (Left : forall gs (ds : list counts) n, length gs = length ds -> cut c n ds <= length ds -> forall p rd, p + cut c n ds - length (make_steps p rd (firstn (cut c n ds) gs) ds) = p).
  { intros gs ds n Lg Lc p rd. assert (X : length (make_steps p rd (firstn (cut c n ds) gs) ds) = cut c n ds).
    { rewrite <- (map_length s_number), numbers_of_steps, seq_length, firstn_length. lia. } lia. }
  pose proof (cut_le c (gsum u) cs) as C1. pose proof (cut_le c (gsum u) cs') as C2.
  assert (Ra : rim a0 = rim b0).
  { unfold rim, a0, b0. cbn [at_phase round aligned collated planned plan outbox queue taken failure stopped urged limit ended_as set_phase set_round set_window set_aligned set_plan set_collated set_planned set_gsum].
    rewrite !Left by lia. congruence. }
  assert (Fails : failure u <> None -> fails (post c r a0) (post c r b0) /\ at_phase (post c r a0) = OFFER).
  { intros Ff. destruct (failing_post c r a0 eq_refl Ff) as [gs [o [-> [Oa To]]]]. destruct (failing_post c r b0 eq_refl ltac:(change (failure v <> None); congruence)) as [hs [p [-> [Ob Tp]]]].
    split; [|reflexivity]. exists o, p, r. auto. }
  destruct b.
  - destruct K as [Q [Fa Fi]]. assert (Ff : failure u <> None) by (destruct Fa as [Fa|Fa]; [unfold is_ending in Fa; rewrite Ph in Fa; discriminate|exact Fa]).
    destruct (Fails Ff) as [Fl Po]. split; [|split; [|intros _; exact Fl]].
    + destruct Fl as [o [o' [q [P1 [P2 _]]]]]. constructor; [|congruence|eauto|congruence].
      destruct (post_eq c r a0) as [[X _]|[_ [_ X]]]; rewrite X in *; [discriminate|]. destruct (post_eq c r b0) as [[Y _]|[_ [_ Y]]]; rewrite Y in *.
      * exfalso. destruct (failing_post c r b0 eq_refl ltac:(change (failure v <> None); congruence)) as [hs [p [Z _]]]. rewrite Z in Y. apply (f_equal at_phase) in Y. discriminate.
      * unfold rim in *. simpl in *. congruence.
    + split; [apply quiet_post; exact Q|]. rewrite Po. split; [right|discriminate]. destruct (post_eq c r a0) as [[-> _]|[_ [_ ->]]]; exact Ff.
  - destruct (uneven_post c r false a0 b0) as [X Y].
    + constructor; simpl; try discriminate. exact Ra.
    + exact K.
    + split; [exact X|]. split; [exact Y|]. intros Ff. apply Fails, Ff.
Qed.

(** Agreements that are both bad, of ranks that were even. *)
Lemma even_bad : forall c r d b u v x x' a, even b u v -> is_bad x = true -> is_bad x' = true -> transition c r d u (Got (Agreed x)) = Some a ->
  exists w, transition c r d v (Got (Agreed x')) = Some w /\ even b a w.
Proof.
  intros c r d b u v x x' a Ev B B' E. simpl in E. simpl. destruct (even_kept _ _ _ Ev) as [F K]. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
  rewrite <- F1. destruct (at_phase u) eqn:Ph; try discriminate. unfold agree in *. rewrite B in E. rewrite B'. injection E as <-. eexists. split; [reflexivity|]. destruct b; [|rewrite Ev; reflexivity].
  destruct K as [Q [Fa Fi]]. split; [|exact Q]. constructor; [unfold face; simpl; rewrite F11, F2; congruence| |discriminate]. right. destruct Fa as [Fa|Fa]; [unfold is_ending in Fa; rewrite Ph in Fa; discriminate|exact Fa].
Qed.

Lemma even_event : forall c r d b u v e a, config_ok c -> even b u v -> transition c r d u e = Some a -> exists w, transition c r d v e = Some w /\ even b a w.
Proof.
  intros c r d b u v e a OK Ev E. destruct b; simpl in Ev; [|subst v; exists a; split; [exact E|reflexivity]]. destruct Ev as [T Q]. destruct (quiet_stays _ _ _ _ _ _ E Q) as [Qa Rd].
  pose proof (event_alike c r d u v e OK T Rd) as X. rewrite E in X. destruct (transition c r d v e) as [w|]; [|contradiction]. exists w. split; [reflexivity|]. split; assumption.
Qed.

(** ** What was exchanged *)

Definition same_answer (x x' : result) : Prop := x = x' \/ (exists a a', x = Agreed a /\ x' = Agreed a' /\ is_bad a = true /\ is_bad a' = true).

Lemma told_cases : forall m m', told m = told m' -> m = m' \/
  (exists o o' q, m = MOffer o /\ m' = MOffer o' /\ o_failed o = Some q /\ o_failed o' = Some q) \/ (exists cs cs', m = MCounts cs /\ m' = MCounts cs' /\ length cs = length cs').
Proof.
  intros [o|cs|r] [o'|cs'|r'] E; simpl in E; try (destruct (o_failed o); discriminate); try (destruct (o_failed o'); discriminate); try discriminate.
  - destruct (o_failed o) as [q|] eqn:F, (o_failed o') as [q'|] eqn:F'; [|injection E as E; subst o'; simpl in F'; discriminate|injection E as E; subst o; simpl in F; discriminate|left; exact E].
    injection E as _ _ _ _ E _ _. subst q'. right. left. exists o, o', q. auto.
  - right. right. exists cs, cs'. injection E as E. apply (f_equal (@length counts)) in E. rewrite !map_length in E. auto.
  - left. exact E.
Qed.

Lemma all_told : forall ms ms', map told ms = map told ms' -> ms = ms' \/
  (exists o o' q, In (MOffer o) ms /\ In (MOffer o') ms' /\ o_failed o = Some q /\ o_failed o' = Some q) \/ (exists cs cs', In (MCounts cs) ms /\ In (MCounts cs') ms' /\ length cs = length cs').
Proof.
  induction ms as [|m ms IH]; intros [|m' ms'] E; simpl in E; try discriminate; [left; reflexivity|]. injection E as E1 E2.
  destruct (told_cases m m' E1) as [-> |[[o [o' [q [-> [-> [A B]]]]]]|[cs [cs' [-> [-> L]]]]]].
  - destruct (IH ms' E2) as [-> |[[o [o' [q [A [B X]]]]]|[cs [cs' [A [B X]]]]]]; [left; reflexivity|right; left|right; right].
    + exists o, o', q. simpl. auto.
    + exists cs, cs'. simpl. auto.
  - right. left. exists o, o', q. simpl. auto.
  - right. right. exists cs, cs'. simpl. auto.
Qed.

Lemma offers_agree : forall ms x o, reduce ms = Some x -> In (MOffer o) ms -> exists a, x = Agreed a /\ (o_failed o <> None -> is_bad a = true).
Proof.
  intros ms x o R I. destruct x as [a|cs|rs].
  - exists a. split; [reflexivity|]. intros F. destruct (reduce_agreed _ _ R) as [os [-> A]]. apply in_map_iff in I as [p [E I]]. injection E as ->. pose proof (ag_failed _ _ A o I F) as G. unfold is_bad. destruct (o_failed a); [reflexivity|congruence].
  - exfalso. destruct (reduce_counted _ _ R) as [l [-> _]]. apply in_map_iff in I as [p [E _]]. discriminate.
  - exfalso. destruct (reduce_reported _ _ R) as [-> _]. apply in_map_iff in I as [p [E _]]. discriminate.
Qed.

Lemma counts_count : forall ms x cs, reduce ms = Some x -> In (MCounts cs) ms -> exists ds, x = Counted ds /\ length cs = length ds.
Proof.
  intros ms x cs R I. destruct x as [a|ds|rs].
  - exfalso. destruct (reduce_agreed _ _ R) as [l [-> _]]. apply in_map_iff in I as [p [E _]]. discriminate.
  - exists ds. split; [reflexivity|]. destruct (reduce_counted _ _ R) as [l [-> [F _]]]. apply in_map_iff in I as [p [E I]]. injection E as ->. rewrite Forall_forall in F. apply F, I.
  - exfalso. destruct (reduce_reported _ _ R) as [-> _]. apply in_map_iff in I as [p [E _]]. discriminate.
Qed.

Lemma same_told : forall ms ms' x x', map told ms = map told ms' -> reduce ms = Some x -> reduce ms' = Some x' ->
  same_answer x x' \/ (exists cs cs', x = Counted cs /\ x' = Counted cs' /\ length cs = length cs' /\ ms <> ms').
Proof.
  intros ms ms' x x' E R R'. destruct (all_told ms ms' E) as [-> |[[o [o' [q [I [I' [F F']]]]]]|[cs [cs' [I [I' L]]]]]].
  - left. left. congruence.
  - left. right. destruct (offers_agree ms x o R I) as [a [-> B]]. destruct (offers_agree ms' x' o' R' I') as [a' [-> B']]. exists a, a'. repeat split; [apply B|apply B']; congruence.
  - destruct (counts_count ms x cs R I) as [ds [-> L1]]. destruct (counts_count ms' x' cs' R' I') as [ds' [-> L2]].
    assert (D : ds = ds' \/ ds <> ds') by (assert (Dc : forall a b : counts, {a = b} + {a <> b}) by (repeat decide equality); destruct (list_eq_dec Dc ds ds'); auto).
    destruct D as [-> |D]; [left; left; reflexivity|right]. exists ds, ds'. split; [reflexivity|]. split; [reflexivity|]. split; [congruence|]. intros ->. congruence.
Qed.

(** ** The system *)

Section Replaced.
Variable W : nat.
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W cfg.
(** No window is bounded in bytes. *)
Hypothesis unbounded : forall r, r < W -> c_bounded (cfg r) r = false.
Notation reachable := (System.reachable W cfg depth input).
Notation step := (System.step W cfg depth input).

(** A run in which machines may be lost: [stood] says of which ranks. A stand-in handles the failure first. *)
Inductive stood_run : (nat -> bool) -> sys -> Prop :=
| stood_start : stood_run (fun _ => false) (start cfg)
| stood_step : forall stood s l t, stood_run stood s -> step s l t -> stood_run stood t
| stood_loss : forall stood s r cause t, stood_run stood s -> r < W -> stood r = false ->
    transition (cfg r) r (depth r) (stand_in (rank_of s r)) (LocalFailed cause) = Some t ->
    stood_run (update stood r true) (mkSys (update (rank_of s) r t) (got s) (if has_posted (rank_of s r) t then update (pending s) r true else pending s) (log s) (running s)).

(** [split] is the place in the log of the first counts that differ. *)
Definition after (split : option nat) (g : nat) : bool := match split with Some n => n <? g | None => false end.

Definition answers (split : option nat) (i : nat) (x x' : result) : Prop :=
  match split with
  | None => same_answer x x'
  | Some n => if i <? n then same_answer x x'
              else if i =? n then exists cs cs', x = Counted cs /\ x' = Counted cs' /\ length cs = length cs'
              else ends_both x x'
  end.

Definition looks (b late : bool) (u v : state) : Prop := if late then uneven u v /\ kept b u v else even b u v.

(** A rank that makes the round after those counts fail, in both runs. *)
Definition breaks (late : bool) (u v : state) : Prop :=
  if late then fails u v \/ at_phase u = REPORT \/ is_ending u = true else at_phase u = COUNT /\ failure u <> None.

Record resembles (stood : nat -> bool) (split : option nat) (s t : sys) : Prop := {
  rs_got : forall r, r < W -> got s r = got t r;
  rs_pending : forall r, r < W -> pending s r = pending t r;
  rs_running : forall r, r < W -> running s r = running t r;
  rs_length : length (log s) = length (log t);
  rs_log : forall i x x', nth_error (results s) i = Some x -> nth_error (results t) i = Some x' -> answers split i x x';
  rs_rank : forall r, r < W -> looks (stood r) (after split (got s r)) (rank_of s r) (rank_of t r);
  rs_split : forall n, split = Some n -> n < length (log s) /\ (forall r, r < W -> n <= got s r) /\
    exists q, q < W /\ stood q = true /\ breaks (n <? got s q) (rank_of s q) (rank_of t q) }.

Lemma looks_rim : forall b late u v, looks b late u v -> (at_phase u, round u, failure u, stopped u, urged u, ended_as u, length (taken u), length (released_of u)) =
  (at_phase v, round v, failure v, stopped v, urged v, ended_as v, length (taken v), length (released_of v)) /\ kept b u v.
Proof.
  intros b late u v L. unfold released_of. destruct late; simpl in L.
  - destruct L as [[R _ _ _] K]. split; [|exact K]. rims R. rewrite !app_length, (numbers_length _ _ F6), (numbers_length _ _ F7), (numbers_length _ _ F8). congruence.
  - destruct (even_kept _ _ _ L) as [F K]. split; [|exact K]. unfold face in F. injection F as F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14 F15 F16.
    rewrite !app_length, (numbers_length _ _ F8), (numbers_length _ _ F9), (numbers_length _ _ F10). congruence.
Qed.

Lemma looks_phase : forall b late u v, looks b late u v -> at_phase u = at_phase v.
Proof. intros b late u v L. destruct (looks_rim b late u v L) as [E _]. congruence. Qed.

Lemma breaks_stays : forall c r d u v e a w late, (forall x, e <> Got x) -> transition c r d u e = Some a -> transition c r d v e = Some w -> at_phase u <> FILL -> at_phase u = at_phase v ->
  breaks late u v -> breaks late a w.
Proof.
  intros c r d u v e a w late NG E E' P Ev B. destruct (moves_on c r d u e a NG E P) as [M1 M2]. destruct (moves_on c r d v e w NG E' ltac:(congruence)) as [M3 _]. destruct late; simpl in *.
  - destruct B as [B|[B|B]].
    + left. unfold fails in *. rewrite M1, M3. exact B.
    + right. left. destruct M2 as [M2|[M2 _]]; congruence.
    + right. right. unfold is_ending in *. destruct M2 as [M2|[_ M2]]; rewrite M2; [exact B|reflexivity].
  - destruct B as [B F]. split; [destruct M2 as [M2|[M2 _]]; congruence|]. pose proof (transition_same c r d u e a NG E) as X. rewrite (sa_failure _ _ X F). exact F.
Qed.

Definition got_or_same (e e' : event) : Prop := (exists x x', e = Got x /\ e' = Got x') \/ (e = e' /\ forall x, e <> Got x).

Lemma event_followed : forall stood split s t i e a, resembles stood split s t -> reachable t -> i < W -> may cfg input s i e ->
  transition (cfg i) i (depth i) (rank_of s i) e = Some a ->
  exists e' w, may cfg input t i e' /\ transition (cfg i) i (depth i) (rank_of t i) e' = Some w /\ got_or_same e e' /\
    let g := match e with Got _ => S (got s i) | _ => got s i end in
    looks (stood i) (after split g) a w /\ (forall n, split = Some n -> stood i = true -> breaks (n <? got s i) (rank_of s i) (rank_of t i) -> breaks (n <? g) a w).
Proof.
  intros stood split s t i e a Rs R H M E. pose proof (rs_rank _ _ _ _ Rs i H) as L. destruct (looks_rim _ _ _ _ L) as [Eq K]. injection Eq as E1 E2 E3 E4 E5 E6 E7 E8.
  assert (Cases : (exists x, e = Got x) \/ (forall x, e <> Got x)) by (destruct e; eauto; right; discriminate). destruct Cases as [[x ->]|NG].
  - destruct M as [M1 M2]. rewrite (rs_pending _ _ _ _ Rs i H) in M1. assert (Lt : got s i < length (log t)).
    { rewrite <- (rs_length _ _ _ _ Rs). unfold results in M2. rewrite <- (map_length snd (log s)). apply nth_error_Some. congruence. }
    destruct (nth_error (results t) (got s i)) as [x'|] eqn:M3; [|apply nth_error_None in M3; unfold results in M3; rewrite map_length in M3; lia].
    pose proof (rs_log _ _ _ _ Rs _ x x' M2 M3) as An.
    assert (Same : same_answer x x' -> after split (got s i) = false -> exists w, transition (cfg i) i (depth i) (rank_of t i) (Got x') = Some w /\ even (stood i) a w).
    { intros [<-|[g [g' [-> [-> [B B']]]]]] Af; rewrite Af in L; simpl in L; [eapply even_event; [apply (configs_ok _ _ ok i H)|exact L|exact E]|exact (even_bad _ _ _ _ _ _ _ _ a L B B' E)]. }
    assert (Mt : may cfg input t i (Got x')) by (split; [exact M1|rewrite <- (rs_got _ _ _ _ Rs i H); exact M3]).
    destruct split as [n|]; simpl in An.
    + destruct (rs_split _ _ _ _ Rs n eq_refl) as [_ [Ge _]]. specialize (Ge i H). replace (got s i <? n) with false in An by (symmetry; apply Nat.ltb_ge; exact Ge).
      assert (Af : n <? S (got s i) = true) by (apply Nat.ltb_lt; lia). destruct (got s i =? n) eqn:Gn.
      * apply Nat.eqb_eq in Gn. assert (Be : n <? got s i = false) by (apply Nat.ltb_ge; lia). unfold after in L. rewrite Be in L. simpl in L. destruct An as [cs [cs' [-> [-> Lc]]]]. destruct (even_kept _ _ _ L) as [F _].
        assert (Ph : at_phase (rank_of s i) = COUNT) by (simpl in E; destruct (at_phase (rank_of s i)); try discriminate; reflexivity).
        pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok t R) i H) as Kt. pose proof (k_plan _ _ _ _ _ _ Kt ltac:(congruence)) as Pl.
        assert (Pu : plan (rank_of s i) = []) by (unfold face in F; injection F as _ _ _ _ _ _ F7 _ _ _ _ _ _ _ _ _; rewrite Pl in F7; destruct (plan (rank_of s i)); [reflexivity|discriminate]).
        destruct (count_uneven _ _ _ _ _ _ cs cs' a F K Lc E Pu) as [w [Ew [U [Kw Fl]]]]. exists (Got (Counted cs')), w. split; [exact Mt|]. split; [exact Ew|]. split; [left; eauto|].
        unfold after, looks. rewrite Af. split; [split; assumption|]. intros m Em St Br. injection Em as <-. rewrite Af. rewrite Be in Br. left. apply Fl, Br.
      * apply Nat.eqb_neq in Gn. assert (Be : n <? got s i = true) by (apply Nat.ltb_lt; lia). unfold after in L. rewrite Be in L. simpl in L. destruct L as [U _].
        destruct (uneven_answer _ _ _ _ _ _ _ _ a U K An E) as [w [Ew [Uw [Kw P]]]]. exists (Got x'), w. split; [exact Mt|]. split; [exact Ew|]. split; [left; eauto|].
        unfold after, looks. rewrite Af. split; [split; assumption|]. intros m Em St Br. injection Em as <-. rewrite Af. right. exact P.
    + destruct (Same An eq_refl) as [w [Ew Ev]]. exists (Got x'), w. split; [exact Mt|]. split; [exact Ew|]. split; [left; eauto|]. split; [exact Ev|discriminate].
  - assert (NF : forall xs en, e <> SamplesRead xs en true) by (intros xs en ->; destruct M as [_ [_ [_ M]]]; destruct (M eq_refl) as [B _]; rewrite (unbounded i H) in B; discriminate).
    assert (G : match e with Got _ => S (got s i) | _ => got s i end = got s i) by (destruct e; try reflexivity; exfalso; eapply NG; reflexivity). cbv zeta. rewrite G.
    assert (Ie : is_ending (rank_of s i) = is_ending (rank_of t i)) by (unfold is_ending; rewrite E1; reflexivity).
    assert (Mt : may cfg input t i e).
    { destruct e as [xs en full| |x| | |cause|]; simpl in *; rewrite <- ?E4, <- ?E1, <- ?E3, <- ?E5, <- ?Ie, <- ?(rs_running _ _ _ _ Rs i H); try exact M; [|exfalso; eapply NG; reflexivity].
      destruct (stood i).
      - destruct K as [[_ Q] _]. rewrite Q in E. discriminate.
      - destruct K as [_ [_ [_ [_ [_ Rd]]]]]. rewrite <- Rd. exact M. }
    assert (X : exists w, transition (cfg i) i (depth i) (rank_of t i) e = Some w /\ looks (stood i) (after split (got s i)) a w).
    { unfold looks in *. destruct (after split (got s i)).
      - destruct L as [U _]. destruct (uneven_event _ _ _ _ _ _ _ a U K NG NF E) as [w [Ew [Uw Kw]]]. eauto.
      - eapply even_event; [apply (configs_ok _ _ ok i H)|exact L|exact E]. }
    destruct X as [w [Ew Lw]]. exists e, w. split; [exact Mt|]. split; [exact Ew|]. split; [right; auto|]. split; [exact Lw|]. intros n En St Br.
    rewrite St in K. destruct K as [_ [_ Nf]]. eapply breaks_stays; eauto.
Qed.

Lemma move_followed : forall stood split s t i e a, resembles stood split s t -> reachable t -> i < W -> may cfg input s i e ->
  transition (cfg i) i (depth i) (rank_of s i) e = Some a ->
  exists l t', step t l t' /\ resembles stood split (mkSys (update (rank_of s) i a)
      (match e with Got _ => update (got s) i (S (got s i)) | _ => got s end)
      (if has_posted (rank_of s i) a then update (pending s) i true else pending s) (log s)
      (match e with StepTaken => update (running s) i true | _ => running s end)) t'.
Proof.
  intros stood split s t i e a Rs R H M E. destruct (event_followed stood split s t i e a Rs R H M E) as [e' [w [M' [E' [Ge [Lw Br]]]]]].
  exists (LRank i e'). eexists. split; [exact (StepRank W cfg depth input t i e' w H M' E')|]. pose proof (looks_phase _ _ _ _ (rs_rank _ _ _ _ Rs i H)) as P1. pose proof (looks_phase _ _ _ _ Lw) as P2.
  assert (Hp : has_posted (rank_of t i) w = has_posted (rank_of s i) a) by (unfold has_posted, is_waiting; rewrite P1, P2; reflexivity). rewrite Hp.
  set (g := match e with Got _ => S (got s i) | _ => got s i end) in *.
  assert (Gs : forall r, r < W -> match e with Got _ => update (got s) i (S (got s i)) | _ => got s end r = if r =? i then g else got s r).
  { intros r Hr. unfold g. destruct e; try (destruct (r =? i) eqn:X; [apply Nat.eqb_eq in X; subst; reflexivity|reflexivity]). unfold update. destruct (r =? i); reflexivity. }
  assert (Gt : forall r, r < W -> match e' with Got _ => update (got t) i (S (got t i)) | _ => got t end r = if r =? i then g else got t r).
  { intros r Hr. pose proof (rs_got _ _ _ _ Rs i H) as Gi. destruct Ge as [[x [x' [-> ->]]]|[<- NG]].
    - unfold g, update. destruct (r =? i); [rewrite Gi; reflexivity|reflexivity].
    - assert (Z : g = got s i) by (unfold g; destruct e; try reflexivity; exfalso; eapply NG; reflexivity). rewrite Z. destruct e; try (destruct (r =? i) eqn:X; [apply Nat.eqb_eq in X; subst; auto|reflexivity]). exfalso. eapply NG. reflexivity. }
  constructor; simpl.
  - intros r Hr. rewrite Gs, Gt by exact Hr. destruct (r =? i); [reflexivity|apply (rs_got _ _ _ _ Rs r Hr)].
  - intros r Hr. destruct (has_posted (rank_of s i) a); [|apply (rs_pending _ _ _ _ Rs r Hr)]. unfold update. destruct (r =? i); [reflexivity|apply (rs_pending _ _ _ _ Rs r Hr)].
  - intros r Hr. pose proof (rs_running _ _ _ _ Rs r Hr) as Ru. destruct Ge as [[x [x' [-> ->]]]|[<- NG]]; [exact Ru|]. destruct e; try exact Ru. unfold update. destruct (r =? i); [reflexivity|exact Ru].
  - apply (rs_length _ _ _ _ Rs).
  - apply (rs_log _ _ _ _ Rs).
  - intros r Hr. rewrite Gs by exact Hr. unfold update. destruct (r =? i) eqn:X; [apply Nat.eqb_eq in X; subst r; exact Lw|apply (rs_rank _ _ _ _ Rs r Hr)].
  - intros n En. destruct (rs_split _ _ _ _ Rs n En) as [S1 [S2 [q [Hq [Sq Bq]]]]]. split; [exact S1|]. split.
    + intros r Hr. rewrite Gs by exact Hr. specialize (S2 r Hr). destruct (r =? i) eqn:X; [|exact S2]. apply Nat.eqb_eq in X. subst r. unfold g. destruct e; lia.
    + exists q. split; [exact Hq|]. split; [exact Sq|]. rewrite Gs by exact Hq. unfold update. destruct (q =? i) eqn:X; [|exact Bq]. apply Nat.eqb_eq in X. subst q. apply (Br n En Sq Bq).
Qed.

(** All ranks have joined: they all look alike, and know all that was exchanged. *)
Lemma joined : forall stood split s t r, resembles stood split s t -> reachable t -> r < W -> (forall q, q < W -> pending s q = true) ->
  got s r = length (log s) /\ is_waiting (rank_of t r) = true /\ at_phase (rank_of s r) = at_phase (rank_of t r).
Proof.
  intros stood split s t r Rs R H P. destruct (pending_current W cfg depth input t r (invariant_of W cfg depth input ok t R) H ltac:(rewrite <- (rs_pending _ _ _ _ Rs r H); apply P, H)) as [_ [G Wa]].
  split; [rewrite (rs_got _ _ _ _ Rs r H), G; symmetry; apply (rs_length _ _ _ _ Rs)|]. split; [exact Wa|]. apply (looks_phase _ _ _ _ (rs_rank _ _ _ _ Rs r H)).
Qed.

Lemma message_kind : forall t r m, reachable t -> r < W -> is_waiting (rank_of t r) = true -> message (rank_of t r) = m ->
  match m with MOffer _ => at_phase (rank_of t r) = OFFER | MCounts _ => at_phase (rank_of t r) = COUNT | MReport _ => at_phase (rank_of t r) = REPORT end.
Proof.
  intros t r m R H Wa E. pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok t R) r H) as K. unfold message in E. unfold is_waiting in Wa. destruct (at_phase (rank_of t r)) eqn:P; try discriminate.
  - destruct (k_offer _ _ _ _ _ _ K P) as [o [Po _]]. rewrite Po in E. subst m. reflexivity.
  - rewrite (k_count _ _ _ _ _ _ K P) in E. subst m. reflexivity.
  - destruct (k_report _ _ _ _ _ _ K P) as [x [Po _]]. rewrite Po in E. subst m. reflexivity.
Qed.

Lemma in_messages_of : forall s r, r < W -> In (message (rank_of s r)) (messages W s).
Proof. intros s r H. eapply nth_error_In, messages_nth, H. Qed.

(** The exchange after the split ends the epoch in both runs. *)
Lemma late_exchange : forall stood n s t x x', resembles stood (Some n) s t -> reachable t -> (forall r, r < W -> pending s r = true) ->
  reduce (messages W s) = Some x -> reduce (messages W t) = Some x' -> ends_both x x'.
Proof.
  intros stood n s t x x' Rs R P Rd Rd'. destruct (rs_split _ _ _ _ Rs n eq_refl) as [Ln [_ [q [Hq [Sq Bq]]]]].
  assert (Late : forall r, r < W -> uneven (rank_of s r) (rank_of t r)).
  { intros r H. destruct (joined _ _ _ _ r Rs R H P) as [G _]. pose proof (rs_rank _ _ _ _ Rs r H) as L. unfold looks, after in L. replace (n <? got s r) with true in L by (symmetry; apply Nat.ltb_lt; lia). apply L. }
  destruct (joined _ _ _ _ q Rs R Hq P) as [Gq [Wq Pq]]. replace (n <? got s q) with true in Bq by (symmetry; apply Nat.ltb_lt; lia). simpl in Bq. destruct Bq as [B|[B|B]].
  - destruct B as [o [o' [c [P1 [P2 [F1 F2]]]]]]. left.
    assert (I1 : In (MOffer o) (messages W s)) by (pose proof (in_messages_of s q Hq) as I; unfold message in I; rewrite P1 in I; exact I).
    assert (I2 : In (MOffer o') (messages W t)) by (pose proof (in_messages_of t q Hq) as I; unfold message in I; rewrite P2 in I; exact I).
    destruct (offers_agree _ _ _ Rd I1) as [a [-> Ba]]. destruct (offers_agree _ _ _ Rd' I2) as [a' [-> Ba']]. exists a, a'. repeat split; [apply Ba|apply Ba']; congruence.
  - right. pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok t R) q Hq) as K. rewrite Pq in B. destruct (k_report _ _ _ _ _ _ K B) as [y [Po _]].
    assert (I2 : In (MReport y) (messages W t)) by (pose proof (in_messages_of t q Hq) as I; unfold message in I; rewrite Po in I; exact I).
    destruct x' as [a|cs|rs].
    + exfalso. destruct (reduce_agreed _ _ Rd') as [l [El _]]. rewrite El in I2. apply in_map_iff in I2 as [z [Ez _]]. discriminate.
    + exfalso. destruct (reduce_counted _ _ Rd') as [l [El _]]. rewrite El in I2. apply in_map_iff in I2 as [z [Ez _]]. discriminate.
    + destruct (reduce_reported _ _ Rd') as [El _]. assert (Em : messages W s = messages W t).
      { unfold messages. apply map_ext_in. intros r Hr. apply in_seq in Hr. assert (H : r < W) by lia. destruct (joined _ _ _ _ r Rs R H P) as [_ [Wr Pr]].
        pose proof (in_messages_of t r H) as I. rewrite El in I. apply in_map_iff in I as [z [Ez _]]. pose proof (message_kind t r _ R H Wr (eq_sym Ez)) as Ph. simpl in Ph.
        unfold message. rewrite (un_report _ _ (Late r H) ltac:(congruence)). reflexivity. }
      rewrite Em, Rd' in Rd. injection Rd as <-. eauto.
  - exfalso. unfold is_ending in B. unfold is_waiting in Wq. rewrite Pq in B. destruct (at_phase (rank_of t q)); discriminate.
Qed.

Lemma exchange_followed : forall stood split s t x, resembles stood split s t -> reachable t -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some x ->
  exists l t' split', step t l t' /\ resembles stood split' (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s)) t'.
Proof.
  intros stood split s t x Rs R P Rd. pose proof (invariant_of W cfg depth input ok t R) as I. assert (P' : forall r, r < W -> pending t r = true) by (intros r H; rewrite <- (rs_pending _ _ _ _ Rs r H); apply P, H).
  destruct (every_exchange_that_all_have_joined_completes W cfg depth input ok t I P') as [x' Rd']. pose proof (rs_length _ _ _ _ Rs) as Len.
  assert (Log : forall sp, (forall i y y', i < length (log s) -> answers split i y y' -> answers sp i y y') -> answers sp (length (log s)) x x' ->
    forall i y y', nth_error (results (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s))) i = Some y ->
      nth_error (results (mkSys (rank_of t) (got t) (fun _ => false) (log t ++ [(messages W t, x')]) (running t))) i = Some y' -> answers sp i y y').
  { intros sp Old New i y y' Hy Hy'. unfold results in Hy, Hy'. simpl in Hy, Hy'. rewrite map_app in Hy, Hy'. destruct (Nat.lt_ge_cases i (length (log s))) as [L|L].
    - rewrite nth_error_app1 in Hy, Hy' by (rewrite map_length; lia). apply Old; [exact L|]. apply (rs_log _ _ _ _ Rs i); assumption.
    - assert (i = length (log s)) by (apply Nat.le_antisymm; [|exact L]; assert (X : i < length (map snd (log s) ++ map snd [(messages W s, x)])) by (apply nth_error_Some; congruence); rewrite app_length, map_length in X; simpl in X; lia). subst i.
      rewrite nth_error_app2, map_length, Nat.sub_diag in Hy by (rewrite map_length; lia). rewrite nth_error_app2, map_length, Len, Nat.sub_diag in Hy' by (rewrite map_length; lia).
      injection Hy as <-. injection Hy' as <-. exact New. }
  assert (Keep : forall sp, (forall i y y', i < length (log s) -> answers split i y y' -> answers sp i y y') -> answers sp (length (log s)) x x' ->
    (forall r, r < W -> looks (stood r) (after sp (got s r)) (rank_of s r) (rank_of t r)) ->
    (forall n, sp = Some n -> n < length (log s ++ [(messages W s, x)]) /\ (forall r, r < W -> n <= got s r) /\ exists q, q < W /\ stood q = true /\ breaks (n <? got s q) (rank_of s q) (rank_of t q)) ->
    exists l t' split', step t l t' /\ resembles stood split' (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s)) t').
  { intros sp Old New Lk Sp. exists LExchange. eexists. exists sp. split; [exact (StepExchange W cfg depth input t x' P' Rd')|]. constructor; simpl; auto.
    - apply (rs_got _ _ _ _ Rs).
    - apply (rs_running _ _ _ _ Rs).
    - rewrite !app_length. simpl. lia. }
  destruct split as [n|].
  - apply (Keep (Some n)); [auto| |apply (rs_rank _ _ _ _ Rs)|].
    + pose proof (late_exchange stood n s t x x' Rs R P Rd Rd') as Z. destruct (rs_split _ _ _ _ Rs n eq_refl) as [Ln _]. simpl.
      replace (length (log s) <? n) with false by (symmetry; apply Nat.ltb_ge; lia). replace (length (log s) =? n) with false by (symmetry; apply Nat.eqb_neq; lia). exact Z.
    + intros m Em. destruct (rs_split _ _ _ _ Rs m Em) as [S1 S2]. split; [rewrite app_length; simpl; lia|exact S2].
  - assert (T : map told (messages W s) = map told (messages W t)).
    { unfold messages. rewrite !map_map. apply map_ext_in. intros r Hr. apply in_seq in Hr. pose proof (rs_rank _ _ _ _ Rs r ltac:(lia)) as L. simpl in L. destruct (even_kept _ _ _ L) as [F _].
      unfold face in F. injection F as _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ F. unfold message. destruct (posted (rank_of s r)), (posted (rank_of t r)); simpl in F; congruence. }
    destruct (same_told _ _ x x' T Rd Rd') as [Sa|[cs [cs' [-> [-> [Lc Nm]]]]]].
    + apply (Keep None); [auto|exact Sa|apply (rs_rank _ _ _ _ Rs)|discriminate].
    + assert (Gs : forall r, r < W -> got s r = length (log s)) by (intros r H; apply (joined _ _ _ _ r Rs R H P)).
      apply (Keep (Some (length (log s)))).
      * intros i y y' L A. simpl. replace (i <? length (log s)) with true by (symmetry; apply Nat.ltb_lt; exact L). exact A.
      * simpl. rewrite Nat.ltb_irrefl, Nat.eqb_refl. eauto.
      * intros r H. simpl. rewrite (Gs r H), Nat.ltb_irrefl. apply (rs_rank _ _ _ _ Rs r H).
      * intros n En. injection En as <-. split; [rewrite app_length; simpl; lia|]. split; [intros r H; rewrite (Gs r H); apply le_n|].
        destruct (existsb stood (seq 0 W)) eqn:Ex.
        -- apply existsb_exists in Ex as [q [Iq Sq]]. apply in_seq in Iq. assert (Hq : q < W) by lia. exists q. split; [exact Hq|]. split; [exact Sq|]. rewrite (Gs q Hq), Nat.ltb_irrefl. simpl.
           destruct (joined _ _ _ _ q Rs R Hq P) as [_ [Wq Pq]]. pose proof (in_messages_of t q Hq) as Im. destruct (reduce_counted _ _ Rd') as [l [El _]]. rewrite El in Im. apply in_map_iff in Im as [z [Ez _]].
           pose proof (message_kind t q _ R Hq Wq (eq_sym Ez)) as Ph. simpl in Ph. split; [congruence|]. pose proof (rs_rank _ _ _ _ Rs q Hq) as L. simpl in L. rewrite Sq in L. destruct L as [[_ Fa _] _].
           destruct Fa as [Fa|Fa]; [|exact Fa]. unfold is_ending in Fa. rewrite Pq, Ph in Fa. discriminate.
        -- exfalso. apply Nm. unfold messages. apply map_ext_in. intros r Hr. pose proof Hr as Hs. apply in_seq in Hs. pose proof (rs_rank _ _ _ _ Rs r ltac:(lia)) as L. simpl in L.
           assert (Sr : stood r = false) by (destruct (stood r) eqn:Z; [|reflexivity]; assert (Y : existsb stood (seq 0 W) = true) by (apply existsb_exists; eauto); congruence). rewrite Sr in L. simpl in L. rewrite L. reflexivity.
Qed.

(** A stand-in takes the place of a rank that was uneven. *)
Lemma told_uneven : forall c r d u v cause, uneven u v -> tight d v ->
  exists a w, transition c r d (stand_in u) (LocalFailed cause) = Some a /\ transition c r d v (LocalFailed cause) = Some w /\ uneven a w /\ kept true a w.
Proof.
  intros c r d u v cause [R C O P] T. pose proof R as F. rims F. simpl. change (is_ending (stand_in u)) with (is_ending u). assert (Ie : is_ending v = is_ending u) by (unfold is_ending; rewrite F1; reflexivity). rewrite Ie, <- F9.
  assert (Rs : rim (stand_in u) = rim v) by (rewrite <- R; unfold rim, stand_in; simpl; rewrite !map_map, !map_length; reflexivity).
  assert (U : uneven (stand_in u) v) by (constructor; [exact Rs|exact C|exact O|exact P]).
  destruct (is_ending u || is_some (failure u)) eqn:E.
  - exists (stand_in u), v. split; [reflexivity|]. split; [reflexivity|]. split; [exact U|]. split; [split; reflexivity|]. apply orb_true_iff in E. split.
    + destruct E as [E|E]; [left; exact E|right; simpl; destruct (failure u); [discriminate|discriminate]].
    + simpl. intros Ph. destruct (t_fill _ _ T ltac:(congruence)) as [M _]. unfold must_end in M. rewrite <- F9 in M. apply orb_false_iff in M as [M _]. rewrite M in E. unfold is_ending in E. rewrite Ph in E. destruct E; discriminate.
  - do 2 eexists. split; [reflexivity|]. split; [reflexivity|]. set (a := set_failure (Some cause) (stand_in u)). set (b := set_failure (Some cause) v).
    assert (Rab : rim a = rim b) by (unfold rim in *; simpl in *; congruence). destruct (at_phase u) eqn:Ph;
      try (rewrite !post_elsewhere by (simpl; congruence); split; [constructor; simpl; rewrite ?Ph; auto; congruence|split; [split; reflexivity|split; [right; discriminate|simpl; congruence]]]).
    destruct (failing_post c r a Ph ltac:(discriminate)) as [gs [o [-> _]]]. destruct (failing_post c r b ltac:(simpl; congruence) ltac:(discriminate)) as [hs [p [-> _]]].
    split; [|split; [split; reflexivity|split; [right; discriminate|discriminate]]]. constructor; simpl; try discriminate; [unfold rim in *; simpl in *; congruence|eauto].
Qed.

Lemma loss_followed : forall stood split s t i cause a, resembles stood split s t -> reachable t -> i < W -> stood i = false ->
  transition (cfg i) i (depth i) (stand_in (rank_of s i)) (LocalFailed cause) = Some a ->
  exists t', reachable t' /\ resembles (update stood i true) split
    (mkSys (update (rank_of s) i a) (got s) (if has_posted (rank_of s i) a then update (pending s) i true else pending s) (log s) (running s)) t'.
Proof.
  intros stood split s t i cause a Rs R H Si E. pose proof (invariant_of W cfg depth input ok t R) as I. pose proof (g_tight _ _ _ _ _ I i H) as T. pose proof (rs_rank _ _ _ _ Rs i H) as L. rewrite Si in L.
  pose proof (looks_phase _ _ _ _ L) as P1.
  assert (X : exists w, transition (cfg i) i (depth i) (rank_of t i) (LocalFailed cause) = Some w /\ looks true (after split (got s i)) a w).
  { unfold looks in *. destruct (after split (got s i)).
    - destruct L as [U _]. destruct (told_uneven (cfg i) i (depth i) _ _ cause U T) as [a' [w [Ea [Ew [Ua Ka]]]]]. rewrite E in Ea. injection Ea as <-. eauto.
    - simpl in L. rewrite L in E. destruct (told_of_a_failure (cfg i) i (depth i) (rank_of t i) cause T) as [a' [w [Ea [Ew Tw]]]]. rewrite E in Ea. injection Ea as <-.
      exists w. split; [exact Ew|]. split; [exact Tw|]. eapply quiet_stays; [exact E|split; reflexivity]. }
  destruct X as [w [Ew Lw]]. pose proof (looks_phase _ _ _ _ Lw) as P2.
  assert (Hp : has_posted (rank_of t i) w = has_posted (rank_of s i) a) by (unfold has_posted, is_waiting; rewrite P1, P2; reflexivity).
  set (t' := mkSys (update (rank_of t) i w) (got t) (if has_posted (rank_of t i) w then update (pending t) i true else pending t) (log t) (running t)).
  assert (Like : forall z, (forall r, r < W -> rank_of z r = rank_of t' r) -> (forall r, r < W -> got z r = got t' r) -> (forall r, r < W -> pending z r = pending t' r) -> (forall r, r < W -> running z r = running t' r) -> log z = log t' ->
    resembles (update stood i true) split (mkSys (update (rank_of s) i a) (got s) (if has_posted (rank_of s i) a then update (pending s) i true else pending s) (log s) (running s)) z).
  { intros z Z1 Z2 Z3 Z4 Z5. constructor; simpl.
    - intros r Hr. rewrite (Z2 r Hr). apply (rs_got _ _ _ _ Rs r Hr).
    - intros r Hr. rewrite (Z3 r Hr). unfold t'. simpl. rewrite Hp. destruct (has_posted (rank_of s i) a); [|apply (rs_pending _ _ _ _ Rs r Hr)]. unfold update. destruct (r =? i); [reflexivity|apply (rs_pending _ _ _ _ Rs r Hr)].
    - intros r Hr. rewrite (Z4 r Hr). apply (rs_running _ _ _ _ Rs r Hr).
    - rewrite Z5. apply (rs_length _ _ _ _ Rs).
    - unfold results at 2. rewrite Z5. apply (rs_log _ _ _ _ Rs).
    - intros r Hr. rewrite (Z1 r Hr). unfold t'. simpl. unfold update. destruct (r =? i) eqn:Q; [apply Nat.eqb_eq in Q; subst r; exact Lw|apply (rs_rank _ _ _ _ Rs r Hr)].
    - intros n En. destruct (rs_split _ _ _ _ Rs n En) as [S1 [S2 [q [Hq [Sq Bq]]]]]. split; [exact S1|]. split; [exact S2|]. exists q. split; [exact Hq|]. rewrite (Z1 q Hq). unfold t'. simpl. unfold update.
      destruct (q =? i) eqn:Q; [apply Nat.eqb_eq in Q; congruence|]. split; assumption. }
  destruct (is_ending (rank_of t i) || is_some (failure (rank_of t i))) eqn:Z.
  - exists t. split; [exact R|]. simpl in Ew. rewrite Z in Ew. injection Ew as <-. apply Like; auto; intros r Hr; unfold t'; simpl.
    + unfold update. destruct (r =? i) eqn:Q; [apply Nat.eqb_eq in Q; subst r; reflexivity|reflexivity].
    + replace (has_posted (rank_of t i) (rank_of t i)) with false; [reflexivity|]. unfold has_posted, is_waiting. destruct (at_phase (rank_of t i)); reflexivity.
  - apply orb_false_iff in Z as [Z1 Z2]. exists t'. split; [|apply Like; auto]. apply (reach_step W cfg depth input t (LRank i (LocalFailed cause)) t' R). apply (StepRank W cfg depth input t i (LocalFailed cause) w H); [|exact Ew].
    split; [exact Z1|]. destruct (failure (rank_of t i)); [discriminate|reflexivity].
Qed.

Lemma run_followed : forall stood s, stood_run stood s -> exists split t, reachable t /\ resembles stood split s t.
Proof.
  intros stood s Run. induction Run as [|stood s l s' Run [split [t [R Rs]]] St|stood s i cause a Run [split [t [R Rs]]] H Si E].
  - exists None, (start cfg). split; [constructor|]. constructor; auto; try discriminate.
    + intros i x x' X. destruct i; discriminate.
    + intros r H. reflexivity.
  - destruct St as [s i e a H M E|s x P Rd|s i H Ru Tk].
    + destruct (move_followed stood split s t i e a Rs R H M E) as [l [t' [St Rs']]]. exists split, t'. split; [eapply reach_step; eauto|exact Rs'].
    + destruct (exchange_followed stood split s t x Rs R P Rd) as [l [t' [sp [St Rs']]]]. exists sp, t'. split; [eapply reach_step; eauto|exact Rs'].
    + assert (Tl : forall r, r < W -> length (taken (rank_of s r)) = length (taken (rank_of t r))) by (intros r Hr; destruct (looks_rim _ _ _ _ (rs_rank _ _ _ _ Rs r Hr)) as [Q _]; congruence).
      exists split. eexists. split.
      * eapply reach_step; [exact R|]. apply (StepTrained W cfg depth input t i H); [rewrite <- (rs_running _ _ _ _ Rs i H); exact Ru|]. intros q Hq. rewrite <- (Tl i H), <- (Tl q Hq). apply Tk, Hq.
      * destruct Rs as [R1 R2 R3 R4 R5 R6 R7]. constructor; simpl; auto. intros r Hr. unfold update. destruct (r =? i); [reflexivity|apply R3, Hr].
  - destruct (loss_followed stood split s t i cause a Rs R H Si E) as [t' [R' Rs']]. exists split, t'. auto.
Qed.

(** R7.6: a run with stand-ins looks like one in which their ranks fail; and the consumer of any other rank is given the very same. *)
Theorem a_run_with_stand_ins_follows_one_of_ranks_that_fail : forall stood s, stood_run stood s -> exists t, reachable t /\ forall r, r < W ->
  let u := rank_of s r in let v := rank_of t r in
  (at_phase u, round u, failure u, stopped u, urged u, ended_as u, length (taken u), length (released_of u)) =
  (at_phase v, round v, failure v, stopped v, urged v, ended_as v, length (taken v), length (released_of v)) /\
  got s r = got t r /\ (stood r = false -> taken u = taken v /\ queue u = queue v /\ released_of u = released_of v).
Proof.
  intros stood s Run. destruct (run_followed stood s Run) as [split [t [R Rs]]]. exists t. split; [exact R|]. intros r H. destruct (looks_rim _ _ _ _ (rs_rank _ _ _ _ Rs r H)) as [E K]. split; [exact E|].
  split; [apply (rs_got _ _ _ _ Rs r H)|]. intros Sr. rewrite Sr in K. destruct K as [K1 [K2 [K3 _]]]. unfold released_of. rewrite K1, K2, K3. auto.
Qed.

(** ABORT, STOP: so ranks that have ended have ended alike, stand-ins among them, and the outcome names a rank that did fail, or stop. *)
Theorem with_stand_ins_ranks_end_alike_and_the_outcome_is_true : forall stood s r q, stood_run stood s -> r < W -> q < W ->
  is_ending (rank_of s r) = true -> is_ending (rank_of s q) = true ->
  ended_as (rank_of s r) = ended_as (rank_of s q) /\ round (rank_of s r) = round (rank_of s q) /\ length (released_of (rank_of s r)) = length (released_of (rank_of s q)) /\
  exists o, ended_as (rank_of s r) = Some o /\ outcome_true W cfg s o.
Proof.
  intros stood s r q Run H Hq E Eq. destruct (run_followed stood s Run) as [split [t [R Rs]]].
  assert (X : forall p, p < W -> (at_phase (rank_of s p), round (rank_of s p), failure (rank_of s p), stopped (rank_of s p), urged (rank_of s p), ended_as (rank_of s p), length (taken (rank_of s p)), length (released_of (rank_of s p))) =
    (at_phase (rank_of t p), round (rank_of t p), failure (rank_of t p), stopped (rank_of t p), urged (rank_of t p), ended_as (rank_of t p), length (taken (rank_of t p)), length (released_of (rank_of t p)))) by (intros p Hp; apply (looks_rim _ _ _ _ (rs_rank _ _ _ _ Rs p Hp))).
  pose proof (X r H) as Xr. pose proof (X q Hq) as Xq. injection Xr as A1 A2 A3 A4 A5 A6 A7 A8. injection Xq as B1 B2 B3 B4 B5 B6 B7 B8.
  assert (Et : is_ending (rank_of t r) = true) by (unfold is_ending in *; rewrite <- A1; exact E). assert (Eqt : is_ending (rank_of t q) = true) by (unfold is_ending in *; rewrite <- B1; exact Eq).
  destruct (failure_ends_all_ranks_in_the_same_round W cfg depth input ok t r q R H Hq Et Eqt) as [O1 [O2 O3]]. destruct (an_outcome_names_the_rank_and_the_cause W cfg depth input ok t r R H Et) as [o [Oo Ot]].
  split; [congruence|]. split; [congruence|]. split; [congruence|]. exists o. split; [congruence|].
  destruct o as [|p n|p n|p|p n]; simpl in *; auto; destruct Ot as [Hp Ot]; (split; [exact Hp|]); pose proof (X p Hp) as Xp; congruence.
Qed.
End Replaced.
