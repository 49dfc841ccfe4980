(** Liveness when processes are gone, peers are lost, and consumers leave, between steps or in the middle of one.

    A process that is gone does nothing more, and what it has posted and what it holds are gone too. By assumption A1 of the spec, a rank
    whose exchange can no longer complete is told: its driver learns that a peer is gone or has given up. *)
Require Import List Arith Lia Bool Decidable.
From ODB Require Import Types Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Loss.
Import ListNotations.

Section Gone.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis deep : forall r, r < W -> 1 <= depth r.
Notation step := (System.step W cfg depth input).
Notation sound h0 := (Keeps.sound W cfg depth input (h0 := h0)).

(** The processes that are gone. *)
Variable gone : nat -> bool.

(** A1: rank [r] must be told. It lives, it still needs the exchange, and a peer is gone or has given up. *)
Definition is_to_be_told (s : sys) (r : nat) : Prop :=
  r < W /\ gone r = false /\ is_ending (rank_of s r) = false /\ exists q, q < W /\ (gone q = true \/ is_lost (rank_of s q) = true).

(** Rank [q]'s consumer takes no more steps. *)
Definition is_out (s : sys) (q : nat) : Prop := gone q = true \/ is_lost (rank_of s q) = true \/ stopped (rank_of s q) = true.

(** The step that rank [r]'s trainer is in never ends. Either a consumer that is out never entered it, or one left (or its process went)
    in the middle of it, before any rank had gone on. *)
Definition never_ends (s : sys) (r : nat) : Prop :=
  (exists q, q < W /\ is_out s q /\ length (taken (rank_of s q)) < length (taken (rank_of s r))) \/
  (forall p, p < W -> length (taken (rank_of s p)) <= length (taken (rank_of s r))) /\
  exists q, q < W /\ (gone q = true \/ stopped (rank_of s q) = true) /\ running s q = true /\ length (taken (rank_of s q)) = length (taken (rank_of s r)).

(** What a live process does by itself, unless its rank has been told of a loss. The exchange completes only while all processes live. *)
Definition lives (s : sys) (l : label) : Prop :=
  match l with LRank r _ | LDrawn r _ _ => gone r = false /\ is_lost (rank_of s r) = false | LTrained r => gone r = false | LExchange => forall q, q < W -> gone q = false end.

(** Something goes on without another fault: a rank, a consumer, the exchange, or a driver that tells its rank. *)
Definition goes_on (s : sys) : Prop :=
  (exists l t, step s l t /\ by_itself W s l /\ lives s l /\ match l with LTrained r => ~ never_ends s r | _ => True end) \/
  exists r, is_to_be_told s r.

(** A consumer on a rank that has not been told can take a step. *)
Lemma take_goes_on : forall {h0} u v r, sound h0 v -> follows W u v -> r < W -> gone r = false -> rank_of u r = rank_of v r -> running u r = false -> takeable (rank_of v r) ->
  goes_on u.
Proof.
  intros h0 u v r R F H G Er Ru T. destruct (takes_its_step W cfg depth input v r R H T) as [t E]. rewrite <- Er in E.
  left. exists (LRank r StepTaken). eexists.
  split; [exact (StepRank W cfg depth input u r StepTaken t H Ru E)|]. split; [exact Logic.I|]. split; [|exact Logic.I].
  split; [exact G|rewrite Er; apply (sound_live W cfg depth input v r R H)].
Qed.

(** If no rank is lost, a step of the run without losses is also possible here. *)
Lemma step_back : forall u v l t, follows W u v -> (forall r, r < W -> is_lost (rank_of u r) = false) -> step v l t -> exists w, step u l w.
Proof.
  intros u v l t F NL St.
  assert (E : forall r, r < W -> rank_of u r = rank_of v r /\ pending u r = pending v r).
  { intros r H. destruct (f_rank _ _ _ _ F r H) as [[_ X]|[L _]]; [exact X|]. pose proof (l_lost _ _ L). rewrite NL in H0 by exact H. discriminate. }
  assert (Res : results u = results v) by (unfold results; rewrite (f_log _ _ _ _ F); reflexivity).
  destruct St as [v r e t H M T|v x P Rd|v r H Ru Tk|v r n la H D].
  - destruct (E r H) as [Er Ep]. pose proof (f_got _ _ _ _ F r H) as Eg. pose proof (f_running _ _ _ _ F r H) as Eu. eexists. eapply (StepRank W cfg depth input u r e t H).
    + destruct e; simpl in *; rewrite ?Er, ?Ep, ?Eg, ?Eu, ?Res; exact M.
    + rewrite Er. exact T.
  - assert (Pu : forall r, r < W -> pending u r = true) by (intros r H; destruct (E r H) as [_ ->]; apply P, H).
    destruct (follows_messages W lost_from u v F Pu) as [Em _]. eexists. apply (StepExchange W cfg depth input u x Pu). rewrite Em. exact Rd.
  - eexists. apply (StepTrained W cfg depth input u r H); [rewrite (f_running _ _ _ _ F r H); exact Ru|]. intros q Hq. destruct (E r H) as [-> _]. destruct (E q Hq) as [-> _]. apply Tk, Hq.
  - destruct (E r H) as [Er Ep]. eexists. apply (StepDrawn W cfg depth input u r n la H). unfold may_draw in *. rewrite Er, Ep, (f_got _ _ _ _ F r H), (f_log _ _ _ _ F). exact D.
Qed.

(** ABORT, STOP, FREE: whichever rank leaves, is lost or is gone, at any time, either something goes on (possibly a driver that tells its
    rank), or the loader of every live process is done or delivers to a trainer inside a step that never ends. *)
Theorem every_live_loader_ends_or_its_trainer_is_in_a_step_that_never_ends : forall u, under_way W cfg depth input u ->
  goes_on u \/ forall r, r < W -> gone r = false -> at_phase (rank_of u r) = DONE \/ (at_phase (rank_of u r) = DRAIN /\ running u r = true /\ never_ends u r).
Proof.
  intros u [h0 [v [R F]]]. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (some_rank _ _ ok) as SR.
  destruct (dec_exists (fun q => gone q || is_lost (rank_of u q)) W) as [[q0 [Hq0 G0]]|NG].
  2:{ (* no process is gone and no rank is lost *)
    assert (NG' : forall r, r < W -> gone r = false /\ is_lost (rank_of u r) = false) by (intros r H; apply orb_false_iff, NG, H).
    assert (E : forall r, r < W -> rank_of u r = rank_of v r) by (intros r H; exact (live_is_followed W u v r F H (proj2 (NG' r H)))).
    assert (Br : forall r, r < W -> broken W v r \/ forsaken W v r -> never_ends u r).
    { intros r H [[A [q [Hq [S1 [S2 S3]]]]]|[_ [q [Hq [S1 S2]]]]].
      - right. split; [intros p Hp; rewrite !E by assumption; apply A, Hp|]. exists q. rewrite !E by assumption. rewrite (f_running _ _ _ _ F q Hq). auto 6.
      - left. exists q. unfold is_out. rewrite !E by assumption. auto. }
    destruct (urged_or_over W cfg depth input ok deep v R) as [[l [t [B [Nb St]]]]|A].
    - left. left. destruct (step_back u v l t F (fun r H => proj2 (NG' r H)) St) as [w Sw]. exists l, w. split; [exact Sw|]. 
      assert (Hl : match l with LRank r _ | LTrained r | LDrawn r _ _ => r < W | LExchange => True end) by (destruct Sw; auto).
      split; [|split].
      + destruct l as [r e| |r|r n la]; auto; [|simpl in *; rewrite E by exact Hl; exact B]. destruct e; auto; [| |destruct B as [q [Hq Sq]]; exists q; rewrite E by exact Hq; auto]; simpl in *; rewrite E by exact Hl; exact B.
      + destruct l as [r e| |r|r n la]; try (apply NG', Hl); try exact (NG' r Hl). intros q Hq. apply NG', Hq.
      + destruct l as [r e| |r|r n la]; auto. intros [[q [Hq [O L]]]|[Al [q [Hq [O [Rq L]]]]]].
        * inversion Sw as [| |? ? ? ? Tk|]; subst. specialize (Tk q Hq). lia.
        * apply Nb. split; [intros p Hp; rewrite <- !E by assumption; apply Al, Hp|]. exists q. rewrite <- !E by assumption. rewrite <- (f_running _ _ _ _ F q Hq).
          destruct O as [O|O]; [destruct (NG' q Hq); congruence|auto].
    - right. intros r H _. rewrite E by exact H. rewrite (f_running _ _ _ _ F r H). destruct (A r H) as [D|[D [Fs|[Rn [B _]]]]]; auto; right; (split; [exact D|]).
      + split; [apply Fs|apply (Br r H); auto].
      + split; [exact Rn|apply (Br r H); auto]. }
  assert (Who : exists q, q < W /\ (gone q = true \/ is_lost (rank_of u q) = true)) by (exists q0; split; [exact Hq0|apply orb_true_iff, G0]).
  destruct (dec_exists (fun r => negb (gone r) && negb (is_ending (rank_of u r))) W) as [[r [H E]]|AE].
  { left. right. exists r. apply andb_true_iff in E as [E1 E2]. apply negb_true_iff in E1. apply negb_true_iff in E2. repeat split; auto. }
  assert (End : forall r, r < W -> gone r = false -> is_ending (rank_of u r) = true) by (intros r H G; specialize (AE r H); rewrite G in AE; simpl in AE; apply negb_false_iff, AE). clear AE.
  apply one_or_each. intros r H. destruct (gone r) eqn:Gr; [right; discriminate|].
  assert (X : goes_on u \/ at_phase (rank_of u r) = DONE \/ (at_phase (rank_of u r) = DRAIN /\ running u r = true /\ never_ends u r)); [|destruct X; auto].
  pose proof (End r H Gr) as Er. unfold is_ending in Er. destruct (at_phase (rank_of u r)) eqn:P; try discriminate; auto.
  destruct (f_rank _ _ _ _ F r H) as [[_ [Xr _]]|[L _]]; [|rewrite (l_phase _ _ L) in P; discriminate]. rewrite Xr in P.
  assert (Ev : is_ending (rank_of v r) = true) by (unfold is_ending; rewrite P; reflexivity).
  destruct (t_drain _ _ (g_tight _ _ _ _ _ I r H) P) as [Ob Li]. pose proof (g_core _ _ _ _ _ I r H) as Kr. destruct (ended_current W cfg depth input v r R H Ev) as [Wr _].
  destruct (ended_outcome W cfg depth input v r R H Ev) as [o [l [Hk _]]].
  assert (Ll : length (taken (rank_of v r)) < l).
  { destruct (stopped (rank_of v r)) eqn:S.
    - destruct (k_stop _ _ _ _ _ _ Kr S) as [m [L1 L2]]. specialize (Li m L1). lia.
    - pose proof (k_free _ _ _ _ _ _ Kr S) as L1. rewrite Wr, Hk in L1. specialize (Li l L1). lia. }
  destruct (running u r) eqn:Run.
  2:{ left. apply (take_goes_on u v r R F H Gr Xr Run). split.
      - destruct (t_released _ _ (g_tight _ _ _ _ _ I r H) Ob) as [D|[l' [D1 D2]]]; [|specialize (Li l' D1); lia]. intros Q. rewrite Q in D. simpl in D. specialize (deep r H). lia.
      - intros l' L. specialize (Li l' L). lia. }
  assert (D : decidable (never_ends u r)) by (unfold never_ends, is_out; decides). destruct D as [Ne|Ne]; [auto 6|].
  destruct (min_exists (fun i => length (taken (rank_of u i))) W SR) as [q [Hq M]]. simpl in M.
  destruct (le_lt_dec (length (taken (rank_of u r))) (length (taken (rank_of u q)))) as [Lq|Lq].
  { left. left. exists (LTrained r). eexists. split; [|split; [exact Logic.I|split; [exact Gr|exact Ne]]]. apply StepTrained; [exact H|exact Run|]. intros i Hi. specialize (M i Hi). lia. }
  assert (In : ~ is_out u q) by (intros O; apply Ne; left; exists q; auto).
  assert (Gq : gone q = false) by (destruct (gone q) eqn:G; [exfalso; apply In; left; exact G|reflexivity]).
  assert (Lost : is_lost (rank_of u q) = false) by (destruct (is_lost (rank_of u q)) eqn:G; [exfalso; apply In; right; left; exact G|reflexivity]).
  assert (Stop : stopped (rank_of u q) = false) by (destruct (stopped (rank_of u q)) eqn:G; [exfalso; apply In; right; right; exact G|reflexivity]).
  destruct (running u q) eqn:Rq.
  { left. left. exists (LTrained q). eexists. split; [|split; [exact Logic.I|split; [exact Gq|]]]; [apply StepTrained; [exact Hq|exact Rq|exact M]|].
    intros [[p [Hp [_ Lp]]]|[Al _]]; [specialize (M p Hp)|specialize (Al r H)]; lia. }
  left. pose proof (live_is_followed W u v q F Hq Lost) as Xq.
  destruct (takeableb (rank_of v q)) eqn:T; [apply (take_goes_on u v q R F Hq Gq Xq Rq); apply takeableb_spec, T|exfalso].
  pose proof (End q Hq Gq) as Eq. rewrite Xq in Eq, Stop. rewrite Xr, Xq in Lq. destruct (ended_current W cfg depth input v q R Hq Eq) as [Wq _]. pose proof (g_core _ _ _ _ _ I q Hq) as Kq.
  pose proof (k_free _ _ _ _ _ _ Kq Stop) as L1. rewrite Wq, Hk in L1.
  assert (Rel : length (taken (rank_of v q)) < length (released_of (rank_of v q))).
  { rewrite (k_released _ _ _ _ _ _ Kq), Wq, <- Wr, <- (k_released _ _ _ _ _ _ Kr). unfold released_of. rewrite !app_length. lia. }
  unfold takeableb, below in T. rewrite L1 in T. replace (length (taken (rank_of v q)) <? l) with true in T by (symmetry; apply Nat.ltb_lt; lia). rewrite andb_true_r in T.
  destruct (queue (rank_of v q)) as [|x ys] eqn:Q; [|discriminate].
  assert (Oq : released (rank_of v q) <> []) by (intros O; unfold released_of in Rel; rewrite Q, O, !app_length in Rel; simpl in Rel; lia).
  destruct (t_released _ _ (g_tight _ _ _ _ _ I q Hq) Oq) as [D|[l' [D1 D2]]]; rewrite Q in *; simpl in *; [specialize (deep q Hq); lia|]. rewrite L1 in D1. injection D1 as <-. lia.
Qed.

End Gone.
