(** ABORT if the exchange breaks (R5.10, R7.5): the same system, except that every rank that is not ending may learn at any moment that
    a peer is lost. A process that is gone is a rank to which nothing more happens.

    A run with losses is followed by one without. In it, a lost rank is replaced by its shadow: the rank as it would be had it not been
    told. The shadow continues to read and collate, and never learns another result. So what is proved of runs without losses, about the
    samples that ranks hold and the steps they have made, also holds of runs with losses. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Age.
Import ListNotations.

(** ** One rank *)

Theorem a_rank_that_is_told_of_a_lost_peer_ends_at_once_as_lost : forall c r d s peer cause, is_ending s = false ->
  exists t, handle c r d s (PeerLost peer cause) = Some t /\ at_phase t = DONE /\ ended_as t = Some (Lost peer cause) /\
    queue t = queue s /\ taken t = taken s /\ has_posted s t = false /\ exists l, limit t = Some l /\ l <= length (taken t).
Proof.
  intros c r d s peer cause E. simpl. eexists. split; [reflexivity|]. unfold lose. rewrite E. simpl.
  repeat split. eexists. split; [reflexivity|]. destruct (limit s); lia.
Qed.

(** A rank that is draining or done no longer needs the exchange. *)
Theorem a_rank_that_is_ending_ignores_a_lost_peer : forall c r d s peer cause, is_ending s = true -> handle c r d s (PeerLost peer cause) = Some s.
Proof. intros c r d s peer cause E. simpl. unfold lose. rewrite E. reflexivity. Qed.

Definition is_lost (s : state) : bool := is_ending s && match ended_as s with Some (Lost _ _) => true | _ => false end.

Lemma complete_is_not_lost : forall s, ended_as s = Some Complete -> is_lost s = false.
Proof. intros s O. unfold is_lost. rewrite O. apply andb_false_r. Qed.

(** A rank that has been told of a loss, compared with the rank as it would be otherwise. *)
Record lost_from (u v : state) : Prop := {
  l_phase : at_phase u = DONE;
  l_lost : is_lost u = true;
  l_live : is_ending v = false;
  l_limit : exists l, limit u = Some l /\ l <= length (taken v);
  l_aligned : aligned u = [];
  l_window : Permutation (window u) (window v ++ concat (aligned v));
  l_round : round u = round v;
  l_read : read u = read v;
  l_ended : ended u = ended v;
  l_wanted : wanted u = wanted v;
  l_plan : plan u = plan v;
  l_collated : collated u = collated v;
  l_released : released u = released v;
  l_queue : queue u = queue v;
  l_taken : taken u = taken v;
  l_failure : failure u = failure v;
  l_stopped : stopped u = stopped v }.

Lemma lose_lost : forall peer cause s, is_ending s = false -> lost_from (lose peer cause s) s.
Proof.
  intros peer cause s E. unfold lose. rewrite E. constructor; simpl; auto.
  - eexists. split; [reflexivity|]. destruct (limit s); lia.
  - destruct (aligned s) as [|g gs] eqn:A; [simpl; rewrite app_nil_r; reflexivity|]. simpl is_nil. cbv iota. apply sort_by_perm.
Qed.

Lemma lost_steps : forall u v, lost_from u v -> steps_of u = steps_of v /\ released_of u = released_of v.
Proof. intros u v L. destruct L. unfold steps_of, released_of. rewrite l_plan0, l_released0, l_queue0, l_taken0. auto. Qed.

Lemma own_event_leaves_lost : forall c r d u e t, (forall x, e <> Got x) -> transition c r d u e = Some t -> is_lost t = is_lost u.
Proof.
  intros c r d u e t NG E. pose proof (sa_outcome _ _ (transition_same _ _ _ _ _ _ NG E)) as O. unfold is_lost. rewrite O. f_equal. unfold is_ending.
  destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [|reflexivity].
  destruct (post_phase c r (moved d u e)) as [-> |[X ->]]; destruct (moved_phase d u e) as [Y|[Y Z]]; try rewrite Z in *; try rewrite Y in *; try rewrite X in *; try discriminate; reflexivity.
Qed.

Lemma post_going : forall c r s, is_ending s = false -> is_ending (post c r s) = false.
Proof. intros c r s E. unfold is_ending in *. destruct (post_phase c r s) as [-> |[_ ->]]; auto. Qed.

(** What a lost rank still does: it reads and collates until what is under way is done. *)
Definition of_its_source (e : event) : Prop := (exists xs en, e = SamplesRead xs en false) \/ e = Collated.

(** These events leave the rest of the rank unchanged. *)
Lemma lost_keeps : forall c r d u e t, at_phase u = DONE -> of_its_source e -> transition c r d u e = Some t ->
  granted u e /\ t = moved d u e /\ (forall x, e <> Got x) /\ e <> StepTaken /\
  at_phase t = DONE /\ ended_as t = ended_as u /\ limit t = limit u /\ steps_of t = steps_of u /\ queue t = queue u /\ taken t = taken u /\ posted t = posted u.
Proof.
  intros c r d u e t P Ev E. assert (NG : forall x, e <> Got x) by (destruct Ev as [[xs [en ->]]| ->]; discriminate).
  destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[_ D]]; [|destruct Ev as [[xs [en ->]]| ->]; discriminate].
  assert (Pm : at_phase (moved d u e) = DONE) by (destruct (moved_phase d u e) as [-> |[X _]]; congruence).
  rewrite post_ending by auto. split; [exact G|]. destruct Ev as [[xs [en ->]]| ->]; repeat split; try discriminate; exact P.
Qed.

(** The shadow can do the same. *)
Lemma shadow_follows : forall c r d u v e t, lost_from u v -> of_its_source e -> transition c r d u e = Some t ->
  exists w, transition c r d v e = Some w /\ lost_from t w.
Proof.
  intros c r d u v e t L Ev E. destruct (lost_keeps _ _ _ _ _ _ (l_phase _ _ L) Ev E) as [G [-> _]]. destruct L. exists (post c r (moved d v e)).
  destruct Ev as [[xs [en ->]]| ->]; simpl in G; (split; [apply granted_event; simpl|]).
  - rewrite <- l_wanted0. intuition discriminate.
  - constructor; simpl; auto; try congruence; try exact l_lost0; try (apply post_going; exact l_live0); [|rewrite l_wanted0; reflexivity].
    rewrite <- app_assoc, (Permutation_app_comm xs), app_assoc. apply Permutation_app_tail. exact l_window0.
  - congruence.
  - constructor; simpl; auto; try congruence; try exact l_lost0. apply post_going; exact l_live0.
Qed.

(** ** The system *)

Section Loss.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).
Notation sound h0 := (Keeps.sound W cfg depth input (h0 := h0)).
Notation step := (System.step W cfg depth input).

(** A transition without losses, or a rank that is told by its driver of a lost peer. *)
Inductive lossy_step : sys -> sys -> Prop :=
| LossyStep : forall s l t, step s l t -> is_draw l = false -> lossy_step s t
| LossyLoss : forall s r peer cause, r < W -> is_ending (rank_of s r) = false ->
    lossy_step s (mkSys (update (rank_of s) r (lose peer cause (rank_of s r))) (got s) (pending s) (log s) (running s)).

(** [n] transitions lead from one state to another, not counting draws. *)
Inductive lossy_path : sys -> nat -> sys -> Prop :=
| lossy_here : forall s, lossy_path s 0 s
| lossy_on : forall s t n u, lossy_path s n t -> lossy_step t u -> lossy_path s (S n) u
| lossy_draw : forall s t n u l, lossy_path s n t -> step t l u -> is_draw l = true -> lossy_path s n u.

Definition lossy_reachable (s : sys) : Prop := exists n, lossy_path (start cfg) n s.

Lemma lossy_reachable_on : forall s n t, lossy_path s n t -> lossy_reachable s -> lossy_reachable t.
Proof. induction 1 as [s|s t n u P IH St|s t n u l P IH St Dr]; intros R; [exact R|..]; destruct (IH R) as [m Q]; eexists; [eapply lossy_on|eapply lossy_draw]; eauto. Qed.

(** Following without the losses: [like] relates a lost rank to its shadow. *)
Section Following.
Variable like : state -> state -> Prop.
Hypothesis like_lose : forall peer cause s, is_ending s = false -> like (lose peer cause s) s.
Hypothesis like_lost : forall u v, like u v -> at_phase u = DONE /\ is_lost u = true /\ taken u = taken v /\ queue u = queue v /\ exists l, limit u = Some l /\ l <= length (taken v).

Definition follows_rank (u v : sys) (r : nat) : Prop :=
  (is_lost (rank_of u r) = false /\ rank_of u r = rank_of v r /\ pending u r = pending v r) \/
  (like (rank_of u r) (rank_of v r) /\ (pending u r = true -> pending v r = true /\ posted (rank_of u r) = posted (rank_of v r))).

Record follows_as (u v : sys) : Prop := {
  f_log : log u = log v;
  f_got : forall r, r < W -> got u r = got v r;
  f_running : forall r, r < W -> running u r = running v r;
  f_rank : forall r, r < W -> follows_rank u v r }.

Lemma follows_taken : forall u v r, follows_as u v -> r < W -> taken (rank_of u r) = taken (rank_of v r).
Proof. intros u v r F H. destruct (f_rank _ _ F r H) as [[_ [-> _]]|[L _]]; [reflexivity|apply (like_lost _ _ L)]. Qed.

Lemma follows_messages : forall u v, follows_as u v -> (forall r, r < W -> pending u r = true) -> messages W u = messages W v /\ forall r, r < W -> pending v r = true.
Proof.
  intros u v F P. split.
  - unfold messages. apply map_ext_seq. intros r H. destruct (f_rank _ _ F r H) as [[_ [-> _]]|[_ L]]; [reflexivity|]. unfold message. destruct (L (P r H)) as [_ ->]. reflexivity.
  - intros r H. destruct (f_rank _ _ F r H) as [[_ [_ <-]]|[_ L]]; [apply P, H|apply L, P, H].
Qed.

(** Only a loss makes a rank lost. *)
Lemma sound_live : forall {h0} s r, sound h0 s -> r < W -> is_lost (rank_of s r) = false.
Proof.
  intros h0 s r R H. destruct (is_ending (rank_of s r)) eqn:E.
  - destruct (ended_outcome W cfg depth input s r R H E) as [o [l [Hk O]]]. pose proof (d_outcome _ _ _ R o l Hk) as T. unfold is_lost. rewrite E, O. destruct o; auto. destruct T.
  - unfold is_lost. rewrite E. reflexivity.
Qed.

Definition lost_ranks (s : sys) : nat := over W (fun r => b2n (is_lost (rank_of s r))).

Lemma lost_stay : forall u u', (forall r, r < W -> is_lost (rank_of u r) = true -> is_lost (rank_of u' r) = true) -> lost_ranks u <= lost_ranks u'.
Proof. intros u u' H. apply over_le. intros r Hr. specialize (H r Hr). destruct (is_lost (rank_of u r)); simpl; [rewrite H by reflexivity; simpl; lia|lia]. Qed.

(** The run without losses takes the same transition, or stays where it is when a rank is lost. *)
Definition follows_by (l : label) (u v u' : sys) : Prop := exists v', step v l v' /\ follows_as u' v' /\ lost_ranks u <= lost_ranks u'.

Definition follows_on (u v u' : sys) : Prop := (exists l, follows_by l u v u' /\ is_draw l = false) \/ (follows_as u' v /\ lost_ranks u + 1 <= lost_ranks u').

Lemma follows_after : forall u v i e t w, follows_as u v -> i < W -> follows_rank (after u i e t) (after v i e w) i -> follows_as (after u i e t) (after v i e w).
Proof.
  intros u v i e t w F H X. constructor; simpl.
  - apply (f_log _ _ F).
  - intros r Hr. destruct e; try apply (f_got _ _ F r Hr). unfold update. destruct (r =? i); [rewrite (f_got _ _ F i H); reflexivity|apply (f_got _ _ F r Hr)].
  - intros r Hr. destruct e; try apply (f_running _ _ F r Hr). unfold update. destruct (r =? i); [reflexivity|apply (f_running _ _ F r Hr)].
  - intros r Hr. destruct (Nat.eq_dec r i) as [->|NE]; [exact X|]. unfold follows_rank. simpl. rewrite !update_other by exact NE.
    destruct (has_posted (rank_of u i) t), (has_posted (rank_of v i) w); rewrite ?update_other by exact NE; apply (f_rank _ _ F r Hr).
Qed.

Lemma live_transition_followed : forall {h0} u v i e t, sound h0 v -> follows_as u v -> i < W -> may cfg input u i e ->
  transition (cfg i) i (depth i) (rank_of u i) e = Some t -> rank_of u i = rank_of v i -> pending u i = pending v i -> follows_by (LRank i e) u v (after u i e t).
Proof.
  intros h0 u v i e t R F H M E Er Ep. pose proof (f_got _ _ F i H) as Eg. pose proof (f_running _ _ F i H) as Eu.
  assert (Res : results u = results v) by (unfold results; rewrite (f_log _ _ F); reflexivity).
  assert (M' : may cfg input v i e) by (destruct e; simpl in *; rewrite ?Er, ?Ep, ?Eg, ?Eu, ?Res in M; exact M). rewrite Er in E.
  pose proof (StepRank W cfg depth input v i e t H M' E) as St. exists (after v i e t). split; [exact St|].
  pose proof (sound_live _ i (step_keeps_sound W cfg depth input ok _ _ _ R St) H) as Lt. simpl in Lt. rewrite update_same in Lt. split.
  - apply follows_after; [exact F|exact H|]. left. simpl. rewrite !update_same, Er. split; [exact Lt|]. split; [reflexivity|]. destruct (has_posted _ t); [rewrite !update_same; reflexivity|exact Ep].
  - apply lost_stay. intros r Hr L. simpl. destruct (Nat.eq_dec r i) as [->|NE]; [|rewrite update_other by exact NE; exact L]. rewrite Er, (sound_live v i R H) in L. discriminate.
Qed.

(** A step of a rank that is not lost, of the exchange or of a trainer. *)
Lemma every_live_step_is_followed : forall {h0} u l v u', sound h0 v -> follows_as u v -> step u l u' -> (forall r e, l = LRank r e -> is_lost (rank_of u r) = false) -> follows_by l u v u'.
Proof.
  intros h0 u l v u' Rv F St Lv. destruct St as [u i e t H M E|u x P Rd|u i H Ru Tk|u i n la H D].
  - destruct (f_rank _ _ F i H) as [[_ [Er Ep]]|[L Pe]]; [apply live_transition_followed with (1 := Rv) (2 := F); auto|]. destruct (like_lost _ _ L) as [_ [X _]]. rewrite (Lv i e eq_refl) in X. discriminate.
  - destruct (follows_messages u v F P) as [Em Pv]. rewrite Em in *. eexists. split; [apply StepExchange; eauto|]. split.
    + constructor; simpl; [rewrite (f_log _ _ F); reflexivity|apply F|apply F|]. intros r Hr. unfold follows_rank. simpl.
        destruct (f_rank _ _ F r Hr) as [[A [B _]]|[L _]]; [left; auto|right; split; [exact L|discriminate]].
    + apply over_le. simpl. lia.
  - eexists. split; [apply StepTrained; [exact H|rewrite <- (f_running _ _ F i H); exact Ru|]|].
    + intros q Hq. rewrite <- (follows_taken u v i F H), <- (follows_taken u v q F Hq). apply Tk, Hq.
    + split; [|apply over_le; simpl; lia]. constructor; simpl; try apply F. intros r Hr. unfold update. destruct (r =? i); [reflexivity|apply (f_running _ _ F r Hr)].
  - destruct (f_rank _ _ F i H) as [[Lf [Er Ep]]|[L _]].
    2:{ exfalso. destruct D as [_ [_ [_ [_ Ph]]]]. rewrite (proj1 (like_lost _ _ L)) in Ph. destruct Ph as [[Ph _]|[Ph _]]; discriminate. }
    exists (drawn v i n la). split; [|split; [|apply Nat.le_refl]].
    + apply StepDrawn; [exact H|]. unfold may_draw in *. rewrite <- Er, <- Ep, <- (f_got _ _ F i H), <- (f_log _ _ F). exact D.
    + constructor; [apply F..|]. intros r Hr. unfold follows_rank. destruct (Nat.eq_dec r i) as [->|NE].
      * left. rewrite !drawn_same, Er. split; [|auto]. rewrite Er in Lf. exact Lf.
      * rewrite !drawn_other by exact NE. exact (f_rank _ _ F r Hr).
Qed.

Lemma every_loss_is_followed : forall u v r peer cause, follows_as u v -> r < W -> is_ending (rank_of u r) = false ->
  let u' := mkSys (update (rank_of u) r (lose peer cause (rank_of u r))) (got u) (pending u) (log u) (running u) in
  follows_as u' v /\ lost_ranks u + 1 <= lost_ranks u'.
Proof.
  intros u v r peer cause F H E u'. destruct (f_rank _ _ F r H) as [[Lf [Er Ep]]|[L _]]; [|exfalso; unfold is_ending in E; rewrite (proj1 (like_lost _ _ L)) in E; discriminate].
    pose proof (like_lose peer cause _ E) as L. split.
    + constructor; simpl; try apply F. intros q Hq. unfold follows_rank. simpl. destruct (Nat.eq_dec q r) as [->|NE]; [|rewrite update_other by exact NE; apply (f_rank _ _ F q Hq)].
      right. rewrite update_same, <- Er. split; [exact L|]. intros P. split; [rewrite <- Ep; exact P|]. unfold lose. rewrite E. reflexivity.
    + rewrite Nat.add_1_r. apply over_lt with (i := r); [exact H| |]; simpl.
      * rewrite update_same, Lf, (proj1 (proj2 (like_lost _ _ L))). simpl. lia.
      * intros j Hj. unfold update. destruct (j =? r) eqn:J; [|lia]. apply Nat.eqb_eq in J. subst j. rewrite Lf. simpl. lia.
Qed.

(** A lost rank can only read and collate. *)
Lemma lost_transition : forall {h0} u v i e t, sound h0 v -> i < W -> may cfg input u i e ->
  transition (cfg i) i (depth i) (rank_of u i) e = Some t -> like (rank_of u i) (rank_of v i) -> of_its_source e.
Proof.
  intros h0 u v i e t R H M E L. destruct (like_lost _ _ L) as [P [_ [_ [Eq [l [L1 L2]]]]]]. unfold of_its_source. destruct e as [xs en full| |x| | |cause|]; eauto.
  { left. exists xs, en. destruct M as [_ [_ [_ M]]]. destruct full; [|reflexivity]. destruct (M eq_refl) as [_ M']. contradiction. }
  all: exfalso.
  - destruct x; simpl in E; rewrite P in E; discriminate.
  - simpl in E. rewrite Eq in E. destruct (queue (rank_of v i)) as [|x q] eqn:Q; [discriminate|].
    rewrite L1, (head_number W cfg depth input v i x q R H Q) in E. simpl in E.
    replace (length (taken (rank_of v i)) <? l) with false in E by (symmetry; apply Nat.ltb_ge; exact L2). discriminate.
  - destruct M as [_ M]. contradiction.
  - destruct M as [M _]. unfold is_ending in M. rewrite P in M. discriminate.
  - destruct M as [M _]. unfold is_ending in M. rewrite P in M. discriminate.
Qed.

Lemma follows_itself : forall {h0} s, sound h0 s -> follows_as s s.
Proof. intros h0 s R. constructor; auto. intros r H. left. split; [exact (sound_live s r R H)|auto]. Qed.

End Following.
Notation follows := (follows_as lost_from).

Lemma lost_shares : forall u v, lost_from u v -> at_phase u = DONE /\ is_lost u = true /\ taken u = taken v /\ queue u = queue v /\ exists l, limit u = Some l /\ l <= length (taken v).
Proof. intros u v []. auto. Qed.

Lemma lost_transition_followed : forall {h0} u v i e t, sound h0 v -> follows u v -> i < W -> may cfg input u i e ->
  transition (cfg i) i (depth i) (rank_of u i) e = Some t -> lost_from (rank_of u i) (rank_of v i) ->
  (pending u i = true -> pending v i = true /\ posted (rank_of u i) = posted (rank_of v i)) -> follows_by lost_from (LRank i e) u v (after u i e t).
Proof.
  intros h0 u v i e t R F H M E L Pe. pose proof (lost_transition lost_from lost_shares u v i e t R H M E L) as Ev. pose proof (so_invariant _ _ _ _ _ R) as I.
  destruct (lost_keeps _ _ _ _ _ _ (l_phase _ _ L) Ev E) as [_ [_ [N1 [_ [Pt [_ [_ [_ [_ [_ Po]]]]]]]]]]. destruct (shadow_follows _ _ _ _ _ e t L Ev E) as [w [E' L']].
  assert (M' : may cfg input v i e) by (destruct Ev as [[xs [en ->]]| ->]; simpl in *; [rewrite (l_read _ _ L) in M; intuition discriminate|exact Logic.I]).
  exists (after v i e w). split; [exact (StepRank W cfg depth input v i e w H M' E')|]. split.
  - apply follows_after; [exact F|exact H|]. right. simpl. replace (has_posted (rank_of u i) t) with false by (unfold has_posted, is_waiting; rewrite Pt; reflexivity).
    rewrite !update_same. split; [exact L'|]. intros P. destruct (Pe P) as [Pv Pm].
    destruct (pending_current W cfg depth input v i I H Pv) as [_ [_ Wa]]. destruct (transition_steady _ _ _ _ _ _ N1 E') as [S1 _]. destruct (S1 Wa) as [_ S2].
    split; [destruct (has_posted (rank_of v i) w); [apply update_same|exact Pv]|congruence].
  - apply lost_stay. intros r Hr Lr. simpl. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same; apply (l_lost _ _ L')|rewrite update_other by exact NE; exact Lr].
Qed.

Lemma every_step_is_followed : forall {h0} u l v u', sound h0 v -> follows u v -> step u l u' -> follows_by lost_from l u v u'.
Proof.
  intros h0 u l v u' R F St. assert (C : (exists r e, l = LRank r e /\ is_lost (rank_of u r) = true) \/ forall r e, l = LRank r e -> is_lost (rank_of u r) = false).
  { destruct l as [r e| | |]; [|right; discriminate..]. destruct (is_lost (rank_of u r)) eqn:L; [left; eauto|right; intros ? ? X; injection X as <- _; exact L]. }
  destruct C as [[r [e [-> L]]]|C]; [|exact (every_live_step_is_followed lost_from lost_shares u l v u' R F St C)]. inversion St as [s i e' t H M E| | |]; subst.
  destruct (f_rank _ _ _ F r H) as [[Lf _]|[Lo Pe]]; [congruence|]. apply lost_transition_followed with (1 := R) (2 := F); auto.
Qed.

Lemma every_lossy_step_is_followed : forall {h0} u v u', sound h0 v -> follows u v -> lossy_step u u' -> follows_on lost_from u v u'.
Proof.
  intros h0 u v u' R F St. destruct St as [u l u' St Dr|u r peer cause H E].
  - left. exists l. split; [exact (every_step_is_followed u l v u' R F St)|exact Dr].
  - right. exact (every_loss_is_followed lost_from lose_lost lost_shares u v r peer cause F H E).
Qed.

Lemma lossy_path_followed : forall {h0} u n w, lossy_path u n w -> forall v, sound h0 v -> follows u v -> exists v',
  System.leads W cfg depth input v v' /\ sound h0 v' /\ follows w v' /\ n + measure W cfg input v' + lost_ranks u <= measure W cfg input v + lost_ranks w.
Proof.
  intros h0. induction 1 as [u|u t n w P IH St|u t n w l P IH St Dr]; intros v R F; [exists v; split; [constructor|split; [exact R|split; [exact F|lia]]]|..];
    destruct (IH v R F) as [v1 [Ld [R1 [F1 B]]]].
  - destruct (every_lossy_step_is_followed t v1 w R1 F1 St) as [[l [[v2 [Sv [F2 Lv]]] Dr]]|[F2 Lv]]; [|exists v1; split; [exact Ld|split; [exact R1|split; [exact F2|lia]]]].
    pose proof (every_transition_lowers_the_measure W cfg depth input ok v1 l v2 R1 Sv) as M. rewrite Dr in M. exists v2.
    split; [eapply leads_on; eauto|split; [exact (step_keeps_sound W cfg depth input ok v1 l v2 R1 Sv)|split; [exact F2|lia]]].
  - destruct (every_step_is_followed t l v1 w R1 F1 St) as [v2 [Sv [F2 Lv]]]. pose proof (every_transition_lowers_the_measure W cfg depth input ok v1 l v2 R1 Sv) as M.
    exists v2. split; [eapply leads_on; eauto|split; [exact (step_keeps_sound W cfg depth input ok v1 l v2 R1 Sv)|split; [exact F2|lia]]].
Qed.

(** TERM, from any sound state in which no trainer is inside a step. *)
Lemma every_lossy_path_is_bounded : forall {h0} s n u, sound h0 s -> (forall r, r < W -> running s r = false) -> lossy_path s n u -> n <= bound W cfg input + W.
Proof.
  intros h0 s n u R Q P. destruct (lossy_path_followed s n u P s R (follows_itself lost_from s R)) as [v [_ [_ [_ B]]]]. pose proof (measure_within_bound W cfg input s Q) as S.
  assert (L : lost_ranks u <= over W (fun _ => 1)) by (apply over_le; intros i _; destruct (is_lost _); simpl; lia). rewrite sum_over_const, seq_length in L. lia.
Qed.

(** A state that follows a sound one. Each of its ranks is the same there, or is the shadow of a lost rank. *)
Definition under_way (u : sys) : Prop := exists (h0 : origin) v, sound h0 v /\ follows u v.

Lemma sound_under_way : forall {h0} s, sound h0 s -> under_way s.
Proof. intros h0 s R. exists h0, s. split; [exact R|exact (follows_itself lost_from s R)]. Qed.

Lemma under_way_on : forall u n w, lossy_path u n w -> under_way u -> under_way w.
Proof. intros u n w P [h0 [v [R F]]]. destruct (lossy_path_followed u n w P v R F) as [v' [_ [R' [F' _]]]]. exists h0, v'. auto. Qed.

(** The root of all that follows: for every state reached with losses there is one reached without, in which each rank is the same or is
    the shadow of a lost rank. *)
Theorem a_run_with_losses_follows_a_run_without : forall u, lossy_reachable u -> exists v, reachable v /\ follows u v.
Proof.
  intros u [n P]. pose proof (reach_start W cfg depth input) as R. destruct (lossy_path_followed _ n u P _ (sound_of ok R) (follows_itself lost_from _ (sound_of ok R))) as [v [Ld [_ [F _]]]].
  exists v. split; [exact (leads_reachable _ _ _ _ _ v Ld R)|exact F].
Qed.

Lemma follows_frame : forall u v r, follows u v -> r < W ->
  steps_of (rank_of u r) = steps_of (rank_of v r) /\ released_of (rank_of u r) = released_of (rank_of v r) /\ round (rank_of u r) = round (rank_of v r) /\
  read (rank_of u r) = read (rank_of v r) /\ collated (rank_of u r) = collated (rank_of v r) /\
  Permutation (concat (aligned (rank_of u r)) ++ window (rank_of u r)) (concat (aligned (rank_of v r)) ++ window (rank_of v r)).
Proof.
  intros u v r F H. destruct (f_rank _ _ _ F r H) as [[_ [-> _]]|[L _]]; [repeat split; reflexivity|]. destruct (lost_steps _ _ L) as [S1 S2]. destruct L.
  rewrite l_aligned0. simpl. repeat split; auto. rewrite l_window0. apply Permutation_app_comm.
Qed.

Lemma live_is_followed : forall u v r, follows u v -> r < W -> is_lost (rank_of u r) = false -> rank_of u r = rank_of v r.
Proof. intros u v r F H L. destruct (f_rank _ _ _ F r H) as [[_ [E _]]|[X _]]; [exact E|]. rewrite (l_lost _ _ X) in L. discriminate. Qed.

(** A rank that is not lost is the same in the run without losses. *)
Lemma a_live_rank_is_followed : forall u r, lossy_reachable u -> r < W -> is_lost (rank_of u r) = false ->
  exists v, reachable v /\ follows u v /\ rank_of u r = rank_of v r /\ pending u r = pending v r.
Proof.
  intros u r Ru H L. destruct (a_run_with_losses_follows_a_run_without u Ru) as [v [R F]]. exists v. split; [exact R|]. split; [exact F|].
  destruct (f_rank _ _ _ F r H) as [[_ X]|[X _]]; [exact X|]. pose proof (l_lost _ _ X). congruence.
Qed.

Lemma a_live_answer_is_the_last : forall u r x, lossy_reachable u -> r < W -> is_lost (rank_of u r) = false -> pending u r = false ->
  nth_error (results u) (got u r) = Some x -> S (got u r) = length (log u).
Proof.
  intros u r x Ru H L P E. destruct (a_live_rank_is_followed u r Ru H L) as [v [R [F [_ Ep]]]]. unfold results in E. rewrite (f_log _ _ _ F), (f_got _ _ _ F r H) in *. rewrite Ep in P.
  apply (sync_answer v r x (g_sync _ _ _ _ _ (invariant_of W cfg depth input ok v R) r H) P E).
Qed.

Lemma all_are_current : forall u r, lossy_reachable u -> (forall q, q < W -> pending u q = true) -> r < W -> got u r = length (log u).
Proof.
  intros u r Ru P H. destruct (a_run_with_losses_follows_a_run_without u Ru) as [v [R F]]. destruct (follows_messages lost_from u v F P) as [_ Pv].
  rewrite (f_log _ _ _ F), (f_got _ _ _ F r H). apply (pending_current W cfg depth input v r (invariant_of W cfg depth input ok v R) H (Pv r H)).
Qed.

Lemma a_live_rank_is_answered : forall u r x, lossy_reachable u -> r < W -> is_lost (rank_of u r) = false -> may cfg input u r (Got x) ->
  exists v, System.invariant W cfg depth input (h0 := fresh) v /\ rank_of u r = rank_of v r /\ may cfg input v r (Got x).
Proof.
  intros u r x Ru H L [M1 [M2 M3]]. destruct (a_live_rank_is_followed u r Ru H L) as [v [R [F [Er Ep]]]]. exists v. split; [exact (invariant_of W cfg depth input ok v R)|].
  split; [exact Er|]. split; [rewrite <- Ep; exact M1|]. split; [unfold results in *; rewrite <- (f_log _ _ _ F), <- (f_got _ _ _ F r H); exact M2|rewrite <- Er; exact M3].
Qed.

Lemma a_ready_rank_has_read : forall u r a, lossy_reachable u -> r < W -> may cfg input u r (Got (Agreed a)) -> at_phase (rank_of u r) = OFFER -> o_ready a = true -> wanted (rank_of u r) = 0.
Proof.
  intros u r a Ru H M Ph Ra. assert (L : is_lost (rank_of u r) = false) by (unfold is_lost, is_ending; rewrite Ph; reflexivity).
  destruct (a_live_rank_is_answered u r _ Ru H L M) as [v [I [Er Mv]]]. destruct (may_admissible W cfg depth input (some_rank _ _ ok) (prints_differ _ _ ok) v r _ I H Mv) as [_ Ad].
  rewrite Er in *. destruct (k_offer _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Ph) as [o [Po O]]. apply (of_ready _ _ _ _ O (Ad Ra o Po)).
Qed.

(** TERM, with losses: each rank is lost at most once. *)
Theorem every_schedule_with_losses_ends_within_the_bound : forall n u, lossy_path (start cfg) n u -> n <= bound W cfg input + W.
Proof.
  intros n u. exact (every_lossy_path_is_bounded (start cfg) n u (sound_of ok (reach_start W cfg depth input)) (fun _ _ => eq_refl)).
Qed.

(** ALIGN, with losses. *)
Theorem with_losses_rounds_are_aligned : forall u r q j x y, under_way u -> r < W -> q < W ->
  nth_error (steps_of (rank_of u r)) j = Some x -> nth_error (steps_of (rank_of u q)) j = Some y ->
  s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y.
Proof.
  intros u r q j x y Ru Hr Hq. destruct Ru as [h0 [v [R F]]].
  destruct (follows_frame u v r F Hr) as [-> _], (follows_frame u v q F Hq) as [-> _]. exact (rounds_are_aligned W cfg depth input v r q j x y R Hr Hq).
Qed.

Theorem with_losses_every_rank_makes_the_same_number_of_steps_in_a_round : forall u r q k, under_way u -> r < W -> q < W ->
  k < round (rank_of u r) -> k < round (rank_of u q) -> length (steps_in_round k (rank_of u r)) = length (steps_in_round k (rank_of u q)).
Proof.
  intros u r q k Ru Hr Hq. destruct Ru as [h0 [v [R F]]]. unfold steps_in_round.
  destruct (follows_frame u v r F Hr) as [-> [_ [-> _]]], (follows_frame u v q F Hq) as [-> [_ [-> _]]].
  exact (every_rank_makes_the_same_number_of_steps_in_a_round W cfg depth input v r q k R Hr Hq).
Qed.

(** CONSERVE, with losses. *)
Theorem with_losses_no_sample_goes_missing : forall u r, under_way u -> r < W ->
  Permutation (samples_of (steps_of (rank_of u r)) ++ concat (aligned (rank_of u r)) ++ window (rank_of u r) ++ skipn (read (rank_of u r)) (input r)) (input r).
Proof.
  intros u r Ru H. destruct Ru as [h0 [v [R F]]]. destruct (follows_frame u v r F H) as [-> [_ [_ [-> [_ Wa]]]]].
  rewrite <- (nothing_is_lost W cfg depth input v r R H) at 2. apply Permutation_app_head. rewrite !app_assoc. apply Permutation_app_tail. exact Wa.
Qed.

(** ONCE, with losses. *)
Theorem with_losses_no_sample_is_emitted_twice : forall u r, under_way u -> r < W -> NoDup (map pos (input r)) ->
  NoDup (map pos (samples_of (steps_of (rank_of u r)))) /\ NoDup (map pos (emitted u r)).
Proof.
  intros u r Ru H ND. destruct Ru as [h0 [v [R F]]]. unfold emitted. destruct (follows_frame u v r F H) as [-> _]. rewrite (follows_taken lost_from lost_shares u v r F H).
  apply (no_sample_is_emitted_twice W cfg depth input v r R H ND).
Qed.

(** RELEASE, with losses. *)
Theorem with_losses_release_needs_every_rank_ready : forall u r q j, under_way u -> r < W -> q < W -> j < length (released_of (rank_of u r)) ->
  j < length (released_of (rank_of u q)) \/ (j < length (steps_of (rank_of u q)) /\ collated (rank_of u q) = true).
Proof.
  intros u r q j Ru Hr Hq. destruct Ru as [h0 [v [R F]]].
  destruct (follows_frame u v r F Hr) as [_ [-> _]], (follows_frame u v q F Hq) as [-> [-> [_ [_ [-> _]]]]]. exact (release_needs_every_rank_ready W cfg depth input v r q j R Hr Hq).
Qed.

Theorem with_losses_join_mode_covers : forall u r, under_way u -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  at_phase (rank_of u r) = DONE -> ended_as (rank_of u r) = Some Complete -> stopped (rank_of u r) = false ->
  Permutation (samples_of (taken (rank_of u r) ++ queue (rank_of u r))) (input r).
Proof.
  intros u r Ru H Jm Nq P O St. destruct Ru as [h0 [v [R F]]].
  pose proof (live_is_followed u v r F H (complete_is_not_lost _ O)) as X. rewrite X in *. exact (join_mode_covers W cfg depth input v r R H Jm Nq P O St).
Qed.

Theorem with_losses_a_complete_rank_has_planned_its_whole_input : forall u r, under_way u -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  is_ending (rank_of u r) = true -> ended_as (rank_of u r) = Some Complete -> has_planned_everything input u r.
Proof.
  intros u r Ru H Jm Nq E O. destruct Ru as [h0 [v [R F]]]. unfold has_planned_everything.
  pose proof (live_is_followed u v r F H (complete_is_not_lost _ O)) as X. rewrite X in *. exact (a_complete_rank_has_planned_its_whole_input W cfg depth input v r R H Jm Nq E O).
Qed.

Theorem with_losses_quota_ranks_close_at_the_same_first_step : forall u r q, under_way u -> r < W -> q < W ->
  is_ending (rank_of u r) = true -> is_ending (rank_of u q) = true -> is_lost (rank_of u q) = false -> ended_as (rank_of u r) = Some Complete ->
  ended_as (rank_of u q) = Some Complete /\ length (steps_of (rank_of u q)) = length (steps_of (rank_of u r)) /\ closes_in_time W cfg input u r.
Proof.
  intros u r q Ru Hr Hq Er Eq Lq O. destruct Ru as [h0 [v [R F]]].
  pose proof (live_is_followed u v r F Hr (complete_is_not_lost _ O)) as Xr. pose proof (live_is_followed u v q F Hq Lq) as Xq. rewrite Xr, Xq in *.
  destruct (quota_ranks_close_at_the_same_first_step W cfg depth input v r q R Hr Hq Er Eq O) as [Q1 [Q2 Q3]].
  split; [exact Q1|]. split; [exact Q2|]. unfold closes_in_time in *. rewrite Xr.
  assert (D : (exists i, i < W /\ has_planned_everything input v i) -> exists i, i < W /\ has_planned_everything input u i).
  { intros [i [Hi P]]. exists i. split; [exact Hi|]. unfold has_planned_everything in *. destruct (follows_frame u v i F Hi) as [-> _]. exact P. }
  destruct (c_quota (cfg 0)); [destruct Q3 as [Q3 [Q4|Q4]]; auto|auto].
Qed.

(** AGE, with losses. *)
Lemma a_live_rank_is_followed_on : forall u n w r, lossy_reachable u -> lossy_path u n w -> r < W -> is_lost (rank_of u r) = false ->
  exists v v', reachable v /\ System.leads W cfg depth input v v' /\ rank_of u r = rank_of v r /\
  steps_of (rank_of w r) = steps_of (rank_of v' r) /\ round (rank_of w r) = round (rank_of v' r).
Proof.
  intros u n w r Ru P H Lf. destruct (a_run_with_losses_follows_a_run_without u Ru) as [v [R F]]. destruct (lossy_path_followed u n w P v (sound_of ok R) F) as [v' [Ld [_ [F' _]]]].
  destruct (follows_frame w v' r F' H) as [Sw [_ [Rw _]]]. exists v, v'. pose proof (live_is_followed u v r F H Lf). auto.
Qed.

Theorem with_losses_a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest :
  (forall r, r < W -> c_updates (cfg r) = None) ->
  (forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) ->
  (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  forall u n w r x, lossy_reachable u -> lossy_path u n w -> r < W ->
  at_phase (rank_of u r) <> COUNT -> is_lost (rank_of u r) = false -> In x (window (rank_of u r)) -> round (rank_of u r) + c_max_age (cfg r) < round (rank_of w r) ->
  exists y, In y (steps_of (rank_of w r)) /\ In x (s_group y) /\ s_round y <= round (rank_of u r) + c_max_age (cfg r).
Proof.
  intros Up Jn Pl u n w r x Ru P H Ph Lf. destruct (a_live_rank_is_followed_on u n w r Ru P H Lf) as [v [v' [R [Ld [X [-> ->]]]]]]. rewrite X in *.
  exact (a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest W cfg depth input ok Up Jn Pl v v' r x R Ld H Ph).
Qed.

Theorem with_losses_in_either_mode_a_sample_is_planned_in_time_or_no_later_round_makes_a_step :
  (forall r, r < W -> c_updates (cfg r) = None) ->
  (forall r, r < W -> c_is_quota (cfg r) = true -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false /\ forall p k j, k <= j -> c_window (cfg r) p k <= c_window (cfg r) r j) ->
  (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  forall u n w r x, lossy_reachable u -> lossy_path u n w -> r < W ->
  at_phase (rank_of u r) <> COUNT -> is_lost (rank_of u r) = false -> In x (window (rank_of u r)) -> round (rank_of u r) + c_max_age (cfg r) < round (rank_of w r) ->
  (exists y, In y (steps_of (rank_of w r)) /\ In x (s_group y) /\ s_round y <= round (rank_of u r) + c_max_age (cfg r)) \/
  (forall y, In y (steps_of (rank_of w r)) -> s_round y <= round (rank_of u r) + c_max_age (cfg r)).
Proof.
  intros Up Gr Pl u n w r x Ru P H Ph Lf. destruct (a_live_rank_is_followed_on u n w r Ru P H Lf) as [v [v' [R [Ld [X [-> ->]]]]]]. rewrite X in *.
  exact (in_either_mode_a_sample_is_planned_in_time_or_no_later_round_makes_a_step W cfg depth input ok Up Gr Pl v v' r x R Ld H Ph).
Qed.

(** STOP, with losses. *)
Theorem with_losses_no_consumer_takes_more_than_one_step_beyond_one_that_stopped : forall u n w r q, under_way u -> lossy_path u n w -> r < W -> q < W ->
  stopped (rank_of u q) = true -> length (taken (rank_of w r)) <= length (taken (rank_of u q)) + 1.
Proof.
  intros u n w r q Ru P Hr Hq St. destruct Ru as [h0 [v [R F]]]. destruct (lossy_path_followed u n w P v R F) as [v' [Ld [_ [F' _]]]].
  rewrite (follows_taken lost_from lost_shares w v' r F' Hr), (follows_taken lost_from lost_shares u v q F Hq).
  assert (Sv : stopped (rank_of v q) = true) by (destruct (f_rank _ _ _ F q Hq) as [[_ [E _]]|[L _]]; [rewrite <- E; exact St|rewrite <- (l_stopped _ _ L); exact St]).
  apply (no_consumer_takes_more_than_one_step_beyond_one_that_stopped W cfg depth input ok v v' r q R Ld Hr Hq Sv).
Qed.

Theorem ranks_that_have_ended_are_lost_or_agree : forall u r q, under_way u -> r < W -> q < W ->
  is_ending (rank_of u r) = true -> is_ending (rank_of u q) = true -> is_lost (rank_of u r) = false -> is_lost (rank_of u q) = false ->
  ended_as (rank_of u r) = ended_as (rank_of u q) /\ round (rank_of u r) = round (rank_of u q) /\ length (released_of (rank_of u r)) = length (released_of (rank_of u q)).
Proof.
  intros u r q Ru Hr Hq Er Eq Lr Lq. destruct Ru as [h0 [v [R F]]].
  pose proof (live_is_followed u v r F Hr Lr) as Xr. pose proof (live_is_followed u v q F Hq Lq) as Xq. rewrite Xr, Xq in *. apply (failure_ends_all_ranks_in_the_same_round W cfg depth input v r q R Hr Hq Er Eq).
Qed.

Theorem with_losses_an_outcome_names_the_rank_and_the_cause : forall u r, under_way u -> r < W -> is_ending (rank_of u r) = true -> is_lost (rank_of u r) = false ->
  exists o, ended_as (rank_of u r) = Some o /\ outcome_true W cfg u o.
Proof.
  intros u r Ru Hr Er Lr. destruct Ru as [h0 [v [R F]]]. pose proof (live_is_followed u v r F Hr Lr) as Xr. rewrite Xr in *.
  destruct (an_outcome_names_the_rank_and_the_cause W cfg depth input v r R Hr Er) as [o [O T]]. exists o. split; [exact O|].
  assert (X : forall q, q < W -> stopped (rank_of u q) = stopped (rank_of v q) /\ failure (rank_of u q) = failure (rank_of v q)).
  { intros q Hq. destruct (f_rank _ _ _ F q Hq) as [[_ [-> _]]|[L _]]; [auto|]. split; [apply (l_stopped _ _ L)|apply (l_failure _ _ L)]. }
  destruct o as [|q n|q c|q|p c]; simpl in *; auto; destruct T as [T1 T2]; split; auto; destruct (X q T1) as [X1 X2]; congruence.
Qed.

Theorem after_a_loss_no_step_is_delivered_or_taken : forall s n u r, lossy_reachable s -> lossy_path s n u -> r < W -> is_lost (rank_of s r) = true ->
  at_phase (rank_of u r) = DONE /\ ended_as (rank_of u r) = ended_as (rank_of s r) /\ queue (rank_of u r) = queue (rank_of s r) /\ taken (rank_of u r) = taken (rank_of s r).
Proof.
  intros s n u r Rs P H Ls.
  assert (Done : forall t, lossy_reachable t -> is_lost (rank_of t r) = true -> exists v, reachable v /\ follows t v /\ lost_from (rank_of t r) (rank_of v r)).
  { intros t Rt Lt. destruct (a_run_with_losses_follows_a_run_without t Rt) as [v [R F]]. destruct (f_rank _ _ _ F r H) as [[L _]|[L _]]; [congruence|eauto]. }
  assert (Kept : forall t l u, lossy_reachable t -> is_lost (rank_of t r) = true -> step t l u -> at_phase (rank_of u r) = DONE /\
    ended_as (rank_of u r) = ended_as (rank_of t r) /\ queue (rank_of u r) = queue (rank_of t r) /\ taken (rank_of u r) = taken (rank_of t r)).
  { intros t l t' Rt Lt St. destruct (Done t Rt Lt) as [v [R [F L]]]. pose proof (l_phase _ _ L) as Ph.
    destruct St as [t i e w Hi M E|t x Pe Rd|t i Hi Run Tk|t i m la Hi Dr]; simpl; auto. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; auto].
    pose proof (lost_transition lost_from lost_shares t v i e w (sound_of ok R) Hi M E L) as Ev.
    destruct (lost_keeps _ _ _ _ _ _ Ph Ev E) as [_ [_ [_ [_ [X1 [X2 [_ [_ [X3 [X4 _]]]]]]]]]]. auto. }
  induction P as [s|s t n u P IH St|s t n u l P IH St Dr]; [destruct (Done s Rs Ls) as [v [_ [_ L]]]; split; [apply (l_phase _ _ L)|auto]|..];
    destruct (IH Rs Ls) as [Pt [Ot [Qt Tt]]]; rewrite <- Ot, <- Qt, <- Tt; pose proof (lossy_reachable_on s n t P Rs) as Rt;
    assert (Lt : is_lost (rank_of t r) = true) by (unfold is_lost in *; apply andb_true_iff in Ls as [_ Ls]; rewrite Ot, Ls; unfold is_ending; rewrite Pt; reflexivity);
    [|exact (Kept t l u Rt Lt St)].
  destruct St as [t l u St _|t i peer cause Hi E]; [exact (Kept t l u Rt Lt St)|]. simpl. destruct (Nat.eq_dec r i) as [->|NE]; [|rewrite update_other by exact NE; auto].
  exfalso. unfold is_ending in E. rewrite Pt in E. discriminate.
Qed.

End Loss.

Lemma on_its_way : forall {W cfg depth input}, setting_ok W cfg -> forall {u}, lossy_reachable W cfg depth input u -> under_way W cfg depth input u.
Proof. intros W cfg depth input ok u [n P]. exact (under_way_on W cfg depth input ok _ n u P (sound_under_way W cfg depth input _ (sound_of ok (reach_start W cfg depth input)))). Qed.

Notation follows W := (follows_as W lost_from).
