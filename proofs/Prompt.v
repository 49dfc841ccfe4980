(** ABORT and STOP as one theorem: a failure, and likewise a stop, ends every rank in its own round or the next.

    The proof follows one rank from the moment it failed or its consumer stopped. Its next offer says so, and the agreement that
    includes such an offer is the last. Only an offer that it had posted before can still end the epoch in another way, or lead to one
    more round. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Loss.
Import ListNotations.

(** ** What a rank offers *)

(** What has happened to the rank: its consumer stopped, or the rank failed. *)
Inductive trouble := AStop | AFailure.

Definition hit (k : trouble) (s : state) : Prop := match k with AStop => stopped s = true | AFailure => failure s <> None end.
Definition says (k : trouble) (o : offer) : bool := match k with AStop => is_some (o_stop_rank o) | AFailure => is_some (o_failed o) end.

(** How the epoch then ends. *)
Definition ends_by (k : trouble) (o : outcome_kind) : Prop :=
  match o with Failed _ _ | Mismatch _ => True | Stopped _ _ => k = AStop | Complete | Lost _ _ => False end.

(** The rank had already posted its offer of the round. *)
Definition had_offered (k : trouble) (s : state) : Prop := at_phase s = OFFER /\ exists o, posted s = Some (MOffer o) /\ says k o = false.

(** The rank [v] has ended in the round in which [u] was hit, or in the next, and so. *)
Definition ends_in_time (k : trouble) (u v : state) (is_true : outcome_kind -> Prop) : Prop := (round v = round u \/ round v = S (round u)) /\
  exists o, ended_as v = Some o /\ is_true o /\ (ends_by k o \/ (had_offered k u /\ round v = round u)).

(** ** One rank *)

Lemma drain_ending : forall d o l s, is_ending (drain d o l s) = true.
Proof. intros. unfold is_ending. destruct (drain_phase d o l s) as [-> | ->]; reflexivity. Qed.

Lemma post_ends : forall c r s, is_ending s = true -> is_ending (post c r s) = true.
Proof. intros c r s E. rewrite post_ending by (unfold is_ending in E; destruct (at_phase s); auto; discriminate). exact E. Qed.

Lemma own_sign : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t ->
  round t = round s /\ ended_as t = ended_as s /\ (failure s <> None -> failure t = failure s) /\ (stopped s = true -> stopped t = true) /\
  (is_ending s = true -> is_ending t = true).
Proof.
  intros c r d s e t NG E. destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> _]]; [|auto 6].
  split; [destruct e; reflexivity|]. split; [destruct e; reflexivity|]. split; [intros F; destruct e; try reflexivity; destruct G; contradiction|].
  split; [intros S; destruct e; try exact S; reflexivity|]. intros En. apply post_ends. unfold is_ending in *. destruct (moved_phase d s e) as [-> |[_ ->]]; [exact En|reflexivity].
Qed.

(** Where a rank that was hit in round [n] can be; [early] means that it had posted its offer before. *)
Definition prompt (k : trouble) (n : nat) (early : Prop) (u : state) : Prop :=
  hit k u /\
  ((round u = n /\ early /\ had_offered k u) \/
   (at_phase u = COUNT /\ round u = n) \/
   ((round u = n \/ round u = S n) /\ at_phase u = OFFER /\ exists o, posted u = Some (MOffer o) /\ says k o = true) \/
   ((round u = n \/ round u = S n) /\ at_phase u = REPORT) \/
   ((round u = n \/ round u = S n) /\ is_ending u = true /\ exists o, ended_as u = Some o /\ (ends_by k o \/ (early /\ round u = n)))).

Lemma hit_must_end : forall k s, hit k s -> must_end s = true.
Proof. intros [|] s H; unfold must_end; simpl in H; [rewrite H; apply orb_true_r|]. destruct (failure s); [reflexivity|easy]. Qed.

Lemma hit_says : forall k c r s gs, hit k s -> says k (compute_offer c r s gs) = true.
Proof. intros [|] c r s gs H; simpl in *; [rewrite H; reflexivity|]. destruct (failure s); [reflexivity|easy]. Qed.

(** What an agreement does to a rank. *)
Lemma agree_sign : forall c r d a s t, agree c r d a s = Some t ->
  failure t = failure s /\ stopped t = stopped s /\ round t = round s /\
  (at_phase t = REPORT \/ (is_bad a = false /\
    (is_ending t = true /\ (exists q n, o_stop_rank a = Some q /\ ended_as t = Some (Stopped q n)) \/
     (o_stop_rank a = None /\ (at_phase t = COUNT \/ is_ending t = true /\ ended_as t = Some Complete))))).
Proof.
  intros c r d a s t E. each_agreement E B Sr Ra Tg Ea; (split; [reflexivity|]); (split; [reflexivity|]); (split; [reflexivity|]); [left; reflexivity|right; split; [reflexivity|]..].
  - left. split; [apply drain_ending|]. eexists. eexists. split; reflexivity.
  - right. split; [reflexivity|]. right. split; [apply drain_ending|reflexivity].
  - right. split; [reflexivity|]. left. reflexivity.
Qed.

Section Prompt.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation sound h0 := (Keeps.sound W cfg depth input (h0 := h0)).
Notation leads := (System.leads W cfg depth input).

Lemma event_keeps_prompt : forall {h0} s r e t k n early, sound h0 s -> r < W -> may cfg input s r e -> transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
  prompt k n early (rank_of s r) -> prompt k n early t.
Proof.
  intros h0 s r e t k n early R H M E [Hk Pr]. pose proof (so_invariant _ _ _ _ _ R) as I.
  pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
  - destruct (got_current W cfg depth input s r y I H M) as [_ [_ [_ [ms [El Em]]]]]. pose proof (log_entry W cfg depth input s _ _ I El) as [_ [Rd _]]. simpl in Rd.
    simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s r)) eqn:Ph; try discriminate.
    + destruct (agree_sign _ _ _ _ _ _ E) as [E1 [E2 [E3 C]]].
      assert (Hk' : hit k t) by (destruct k; simpl in *; congruence). split; [exact Hk'|]. rewrite E3.
      assert (Rn : round (rank_of s r) = n \/ round (rank_of s r) = S n) by (destruct Pr as [[-> _]|[[X _]|[[X _]|[[_ X]|[_ [X _]]]]]]; auto; try congruence; unfold is_ending in X; rewrite Ph in X; discriminate).
      destruct C as [C|[B C]]; [auto 6|].
      assert (Early : round (rank_of s r) = n /\ early \/ exists o, posted (rank_of s r) = Some (MOffer o) /\ says k o = true).
      { destruct Pr as [[X [Y _]]|[[X _]|[[_ [_ X]]|[[_ X]|[_ [X _]]]]]]; auto; try congruence. unfold is_ending in X. rewrite Ph in X. discriminate. }
      destruct Early as [[Rs Ea]|[o [Po So]]].
      * rewrite Rs. destruct C as [[C1 [q [m [_ C2]]]]|[_ [C|[C1 C2]]]]; [|auto 6|]; right; right; right; right; (split; [auto|]; split; [assumption|]; eexists; split; [eassumption|auto]).
      * unfold message in Em. rewrite Po in Em. destruct (reduce_says _ _ _ Rd (nth_error_In _ _ Em)) as [os [_ [A Io]]].
        destruct k; simpl in So.
        -- assert (Ne : o_stop_rank a <> None) by (apply (ag_stop _ _ A o Io); destruct (o_stop_rank o); [discriminate|discriminate So]).
           destruct C as [[C1 [q [m [_ C2]]]]|[C _]]; [|contradiction]. right. right. right. right. split; [exact Rn|]. split; [exact C1|]. eexists. split; [exact C2|]. left. reflexivity.
        -- assert (Ne : o_failed a <> None) by (apply (ag_failed _ _ A o Io); destruct (o_failed o); [discriminate|discriminate So]).
           exfalso. unfold is_bad in B. destruct (o_failed a); [discriminate|easy].
    + unfold count in E. destruct (negb _); [discriminate|]. injection E as <-. set (u := set_phase FILL _).
      assert (Hu : hit k u) by (destruct k; exact Hk). assert (Ru : round u = S (round (rank_of s r))) by reflexivity.
      assert (Rs : round (rank_of s r) = n) by (destruct Pr as [[X _]|[[_ X]|[[_ [X _]]|[[_ X]|[_ [X _]]]]]]; auto; try congruence; unfold is_ending in X; rewrite Ph in X; discriminate).
      destruct (post_eq (cfg r) r u) as [[_ X]|[_ [_ Eq]]]; [destruct (X eq_refl) as [X1 _]; rewrite (hit_must_end k u Hu) in X1; discriminate|].
      rewrite Eq. split; [destruct k; exact Hu|]. right. right. left. split; [right; simpl; congruence|]. split; [reflexivity|]. eexists. split; [reflexivity|]. apply hit_says, Hu.
    + destruct (failure_of rs) as [o|] eqn:Fo; [|discriminate]. injection E as <-. apply failure_of_kind in Fo.
      match goal with |- prompt _ _ _ (drain ?d ?o ?l ?u) => pose proof (drain_ending d o l u) as Y end.
      split; [destruct k; exact Hk|]. right. right. right. right. split.
      * destruct Pr as [[_ [_ [X _]]]|[[X _]|[[_ [X _]]|[[X _]|[_ [X _]]]]]]; auto; try congruence; unfold is_ending in X; rewrite Ph in X; discriminate.
      * split; [exact Y|]. exists o. split; [reflexivity|]. left. destruct o; simpl in *; tauto.
  - destruct (own_sign _ _ _ _ _ _ NG E) as [E1 [E2 [E3 [E4 E5]]]]. destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 _].
    split; [destruct k; simpl in *; [auto|rewrite E3; auto]|]. rewrite E1, E2. unfold had_offered in *.
    assert (Wa : is_waiting (rank_of s r) = true -> at_phase t = at_phase (rank_of s r) /\ posted t = posted (rank_of s r)) by exact S1. unfold is_waiting in Wa.
    destruct Pr as [[X [Y [Ph Z]]]|[[Ph X]|[[X [Ph Z]]|[[X Ph]|[X [Ph Z]]]]]].
    + rewrite Ph in Wa. destruct (Wa eq_refl) as [-> ->]. auto 6.
    + rewrite Ph in Wa. destruct (Wa eq_refl) as [-> _]. auto 6.
    + rewrite Ph in Wa. destruct (Wa eq_refl) as [-> ->]. auto 8.
    + rewrite Ph in Wa. destruct (Wa eq_refl) as [-> _]. auto 8.
    + auto 12.
Qed.

Lemma prompt_stays : forall {h0} s t r k n early, sound h0 s -> leads s t -> r < W -> prompt k n early (rank_of s r) -> prompt k n early (rank_of t r).
Proof.
  intros h0 s t r k n early R Ld H P. induction Ld as [s|s t l u Ld IH St]; [exact P|]. specialize (IH R P). pose proof (leads_sound W cfg depth input ok s t Ld R) as R'.
  destruct St as [t i e v Hi M E|t x Pd Rd|t i Hi Ru Tk|t i m la Hi Dr]; [|exact IH..]. simpl. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact IH].
  eapply event_keeps_prompt; eauto.
Qed.

Lemma prompt_at_first : forall {h0} s r k, sound h0 s -> r < W -> hit k (rank_of s r) -> is_ending (rank_of s r) = false ->
  prompt k (round (rank_of s r)) (had_offered k (rank_of s r)) (rank_of s r).
Proof.
  intros h0 s r k R H Hk E. split; [exact Hk|]. pose proof (so_invariant _ _ _ _ _ R) as I. unfold is_ending in E.
  destruct (at_phase (rank_of s r)) eqn:Ph; try discriminate; [|destruct (k_offer _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Ph) as [o [Po _]]; destruct (says k o) eqn:So|auto 6|auto 8].
  - exfalso. destruct (t_fill _ _ (g_tight _ _ _ _ _ I r H) Ph) as [M _]. rewrite (hit_must_end k _ Hk) in M. discriminate.
  - right. right. left. split; [auto|]. split; [reflexivity|]. eauto.
  - left. assert (O : had_offered k (rank_of s r)) by (split; [exact Ph|eauto]). auto.
Qed.

(** If some rank has ended, every rank can go on to its end. *)
Lemma everyone_can_end : forall {h0} t r q, sound h0 t -> r < W -> q < W -> is_ending (rank_of t q) = true ->
  exists u, leads t u /\ is_ending (rank_of u r) = true /\ rank_of u q = rank_of t q.
Proof.
  intros h0 t r q R Hr Hq E. destruct (is_ending (rank_of t r)) eqn:Er; [exists t; split; [constructor|auto]|].
  pose proof (so_invariant _ _ _ _ _ R) as I. destruct (ended_outcome W cfg depth input t q R Hq E) as [o [l [Hk _]]].
  destruct (ended_current W cfg depth input t q R Hq E) as [_ Gq].
  destruct (hist_cases W cfg depth input t r I Hr) as [[Gr Wr]|[Pr [Gr [Wa [ms [x [El [_ Wx]]]]]]]].
  - exfalso. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I r Hr))) as Ph. rewrite Wr, Hk in Ph. unfold is_ending in Er. destruct Ph as [Ph|Ph]; rewrite Ph in Er; discriminate.
  - assert (M : may cfg input t r (Got x)).
    { split; [exact Pr|]. split; [exact (results_nth _ _ _ El)|]. intros _.
      exact (more_unless_counting _ _ _ _ _ _ (g_core _ _ _ _ _ I r Hr) (closed_not_counting W cfg depth input t r o l R Hr Hk)). }
    destruct (every_result_is_accepted W cfg depth input t r x R Hr Pr (results_nth _ _ _ El)) as [v Ev].
    pose proof (StepRank W cfg depth input t r (Got x) v Hr M Ev) as St. match type of St with System.step _ _ _ _ _ _ ?z => set (u := z) in * end.
    exists u. split; [eapply leads_on; [constructor|exact St]|].
    assert (NE : q <> r) by congruence. assert (Ur : rank_of u r = v) by (simpl; apply update_same). assert (Uq : rank_of u q = rank_of t q) by (simpl; apply update_other, NE).
    split; [|exact Uq]. assert (Ru : sound h0 u) by exact (step_keeps_sound W cfg depth input ok t _ u R St).
    pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ Ru r Hr))) as Ph.
    unfold System.hist_from, seen in Ph. change (results u) with (results t) in Ph. replace (got u r) with (S (got t r)) in Ph by (symmetry; simpl; apply update_same).
    rewrite (firstn_snoc _ _ _ x (results_nth _ _ _ El)), history_snoc in Ph. change (history_from h0 (cfg 0) (firstn (got t r) (results t))) with (hist_from cfg h0 t r) in Ph. rewrite <- Wx, Hk in Ph.
    unfold is_ending. destruct Ph as [-> | ->]; reflexivity.
Qed.

Lemma trouble_ends_the_epoch : forall {h0} k s t r q, sound h0 s -> leads s t -> r < W -> q < W -> hit k (rank_of s r) -> is_ending (rank_of s r) = false -> is_ending (rank_of t q) = true ->
  ends_in_time k (rank_of s r) (rank_of t q) (fun _ => True).
Proof.
  intros h0 k s t r q R Ld Hr Hq Hk E Eq. pose proof (leads_sound W cfg depth input ok s t Ld R) as R'.
  destruct (everyone_can_end t r q R' Hr Hq Eq) as [u [Lu [Er Uq]]].
  assert (Lsu : leads s u) by (clear - Ld Lu; induction Lu as [u|t' u l w Lu IH St]; [exact Ld|eapply leads_on; [apply IH; exact Ld|exact St]]).
  pose proof (leads_sound W cfg depth input ok s u Lsu R) as Ru. destruct (prompt_stays s u r k _ _ R Lsu Hr (prompt_at_first s r k R Hr Hk E)) as [_ P].
  assert (Eq' : is_ending (rank_of u q) = true) by (rewrite Uq; exact Eq). destruct (failure_ends_all_ranks_in_the_same_round W cfg depth input u r q Ru Hr Hq Er Eq') as [A1 [A2 _]]. rewrite Uq in A1, A2.
  unfold ends_in_time. rewrite <- A1, <- A2. unfold is_ending in Er. destruct P as [[_ [_ [X _]]]|[[X _]|[[_ [X _]]|[[_ X]|[X [_ Y]]]]]]; try (rewrite X in Er; discriminate). destruct Y as [o Y]. split; [exact X|exists o; tauto].
Qed.

(** ABORT, STOP. If a rank fails in round [k], every rank ends in round [k] or the next, as FAILED, naming a rank that did fail and its
    cause, or as MISMATCH, if configurations differ. If a consumer leaves, the same holds, and STOPPED is possible too, naming a rank
    whose consumer has stopped. Only if the rank had already posted its offer of round [k] may round [k] end the epoch for another
    reason. When nothing more can happen by itself, every rank has ended. *)
Theorem a_failure_or_a_stop_in_round_k_ends_every_rank_in_round_k_or_the_next : forall {h0} k s t r, sound h0 s -> leads s t -> r < W ->
  hit k (rank_of s r) -> is_ending (rank_of s r) = false ->
  (forall q, q < W -> is_ending (rank_of t q) = true -> ends_in_time k (rank_of s r) (rank_of t q) (outcome_true W cfg t)) /\
  ((forall i, i < W -> 1 <= depth i) -> ~ can W cfg depth input (by_itself W t) t -> forall q, q < W -> is_ending (rank_of t q) = true).
Proof.
  intros h0 k s t r R Ld Hr F E. pose proof (leads_sound W cfg depth input ok s t Ld R) as R'. split.
  - intros q Hq Eq. destruct (trouble_ends_the_epoch k s t r q R Ld Hr Hq F E Eq) as [A [o [O [_ B]]]]. split; [exact A|]. exists o. split; [exact O|].
    destruct (an_outcome_names_the_rank_and_the_cause W cfg depth input t q R' Hq Eq) as [o' [O' T]]. rewrite O in O'. injection O' as <-. auto.
  - intros deep Nc q Hq. destruct (after_a_stop_every_loader_ends_or_its_trainer_waits_for_the_one_that_left W cfg depth input ok deep t R') as [C|A]; [contradiction|].
    unfold is_ending. destruct (A q Hq) as [-> |[-> _]]; reflexivity.
Qed.

Theorem with_losses_a_failure_or_a_stop_ends_every_other_rank_in_its_round_or_the_next : forall k s n t r q,
  under_way W cfg depth input s -> lossy_path W cfg depth input s n t -> r < W -> q < W ->
  hit k (rank_of s r) -> is_ending (rank_of s r) = false -> is_ending (rank_of t q) = true -> is_lost (rank_of t q) = false ->
  ends_in_time k (rank_of s r) (rank_of t q) (outcome_true W cfg t).
Proof.
  intros k s n t r q Rs P Hr Hq Hk E Eq Lq. pose proof (under_way_on W cfg depth input ok s n t P Rs) as Rt. destruct Rs as [h0 [v [R F]]].
  destruct (lossy_path_followed W cfg depth input ok s n t P v R F) as [w [Ld [_ [Fw _]]]].
  destruct (f_rank _ _ _ _ F r Hr) as [[_ [Xr _]]|[L _]]; [|unfold is_ending in E; rewrite (l_phase _ _ L) in E; discriminate].
  pose proof (live_is_followed W t w q Fw Hq Lq) as Xq.
  destruct (with_losses_an_outcome_names_the_rank_and_the_cause W cfg depth input t q Rt Hq Eq Lq) as [o' [O' T]].
  rewrite Xr, Xq in *. destruct (trouble_ends_the_epoch k v w r q R Ld Hr Hq Hk E Eq) as [A [o [O [_ B]]]]. split; [exact A|].
  exists o. rewrite O in O'. injection O' as <-. auto.
Qed.

End Prompt.
