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
  intros c r d u e t E Q. pose proof Q as [Q1 Q2]. destruct e as [xs en| |x| | |cause|]; simpl in E; simpl.
  - rewrite Q2 in E. discriminate.
  - split; [|reflexivity]. destruct (collated u); [discriminate|]. injection E as <-. apply quiet_post. exact Q.
  - split; [|reflexivity]. destruct x as [a|cs|rs]; destruct (at_phase u); try discriminate.
    + unfold agree in E. destruct (is_bad a); [injection E as <-; exact Q|]. destruct (negb _); [discriminate|]. destruct (o_stop_rank a); [injection E as <-; apply quiet_drain; exact Q|].
      destruct (negb _); [discriminate|]. destruct (target c a); [injection E as <-; apply quiet_drain; exact Q|]. destruct (c_align _ _ _ _). injection E as <-. apply quiet_deliver.
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
  destruct e as [xs en| |x| | |cause|]; simpl in E.
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

(** A stand-in has failed; what is no stand-in has the same steps in its hands. *)
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
  intros [] u v P K; simpl in *; [|apply hands_finish; assumption]. destruct K as [Q [F N]]. split; [apply quiet_finish, Q|].
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

Lemma uneven_event : forall c r d b u v e a, uneven u v -> kept b u v -> (forall x, e <> Got x) -> transition c r d u e = Some a ->
  exists w, transition c r d v e = Some w /\ uneven a w /\ kept b a w.
Proof.
  intros c r d b u v e a U K NG E. pose proof U as [R C O P]. pose proof R as F. rims F. destruct e as [xs en| |x| | |cause|]; simpl in E; simpl.
  - destruct b; simpl in K; [destruct K as [[_ Q] _]; rewrite Q in E; discriminate|]. pose proof K as [H1 [H2 [H3 [H4 [H5 H6]]]]]. rewrite <- H4. destruct (_ || _); [discriminate|]. injection E as <-.
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
