(** REPLAY and RESUME with losses: whichever ranks are lost, and whenever, the planned steps are those of a run without losses. *)
Require Import List Arith Lia Bool.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Coupled Loss Replay.
Import ListNotations.

Section ReplayLoss.
Variables (W : nat) (c : config) (src : nat -> reader) (input : nat -> list sample).
Hypothesis ok : setting_ok W (fun _ => c).
Notation cfg := (fun _ : nat => c).
Notation ends_alike := (Replay.ends_alike src input).

(** How a lost rank's source answers does not matter. *)
Definition of_lost (s : sys) (l : label) : Prop := match l with LRank r _ => is_lost (rank_of s r) = true | _ => False end.

(** Runs without losses, which go on while sources answer as in REPLAY, and plan alike: those of REPLAY, and jobs that were loaded. *)
Variable runs : (nat -> nat) -> sys -> Prop.
Hypothesis runs_sound : forall depth s, runs depth s -> exists h0, Keeps.sound W cfg depth input (h0 := h0) s.
Hypothesis runs_on : forall depth s l t, runs depth s -> System.step W cfg depth input s l t -> ends_alike s l -> runs depth t.

Hypothesis runs_alike : plan_alike W runs.
Hypothesis runs_complete_alike : complete_alike W runs.

(** Such a run at the depth [depth], in which any rank may be told at any moment that a peer is lost. *)
Inductive lossy_runs (depth : nat -> nat) : sys -> Prop :=
| lossy_run_begins : forall s, runs depth s -> lossy_runs depth s
| lossy_run_step : forall s l t, lossy_runs depth s -> System.step W cfg depth input s l t -> ends_alike s l \/ of_lost s l -> lossy_runs depth t
| lossy_run_loss : forall s r peer cause, lossy_runs depth s -> r < W -> is_ending (rank_of s r) = false ->
    lossy_runs depth (mkSys (update (rank_of s) r (lose peer cause (rank_of s r))) (got s) (pending s) (log s) (running s)).

(** A lost rank and its shadow, which stays as it was when the rank was lost. *)
Record left_behind (u v : state) : Prop := {
  lb_phase : at_phase u = DONE;
  lb_lost : is_lost u = true;
  lb_limit : exists l, limit u = Some l /\ l <= length (taken v);
  lb_steps : steps_of u = steps_of v;
  lb_queue : queue u = queue v;
  lb_taken : taken u = taken v }.

Lemma lose_leaves : forall peer cause s, is_ending s = false -> left_behind (lose peer cause s) s.
Proof. intros peer cause s E. pose proof (lose_lost peer cause s E) as L. destruct (lost_steps _ _ L) as [S _]. destruct L. constructor; auto. Qed.

Lemma left_shares : forall u v, left_behind u v -> at_phase u = DONE /\ is_lost u = true /\ taken u = taken v /\ queue u = queue v /\ exists l, limit u = Some l /\ l <= length (taken v).
Proof. intros u v []. auto. Qed.

(** This relation survives whatever the lost rank still reads. *)
Lemma left_stays : forall {h0} depth s v r e t, Keeps.sound W cfg depth input (h0 := h0) v -> r < W -> may cfg input s r e -> transition c r (depth r) (rank_of s r) e = Some t ->
  left_behind (rank_of s r) (rank_of v r) -> left_behind t (rank_of v r) /\ posted t = posted (rank_of s r) /\ (forall x, e <> Got x) /\ e <> StepTaken.
Proof.
  intros h0 depth s v r e t Rv H M E L. pose proof (lost_transition W cfg depth input left_behind left_shares s v r e t Rv H M E L) as Ev.
  destruct L as [P Lo Li S Q T]. destruct (lost_keeps _ _ _ _ _ _ P Ev E) as [_ [_ [NG [NT [Pt [Ot [Lt [St [Qt [Tt Po]]]]]]]]]].
  split; [|auto]. constructor; try congruence; [|rewrite Lt; exact Li]. unfold is_lost, is_ending in *. rewrite Pt, Ot. rewrite P in Lo. exact Lo.
Qed.

Lemma a_run_with_losses_follows_one_without : forall depth u, lossy_runs depth u -> exists v, runs depth v /\ follows_as W left_behind u v.
Proof.
  intros depth u P. induction P as [s R|u l u' P [v [R F]] St A|u r peer cause P [v [R F]] H E].
  - destruct (runs_sound depth s R) as [h0 So]. exists s. split; [exact R|exact (follows_itself W cfg depth input left_behind s So)].
  - destruct (runs_sound depth v R) as [h0 Rv].
    assert (C : (exists r e, l = LRank r e /\ is_lost (rank_of u r) = true) \/ forall r e, l = LRank r e -> is_lost (rank_of u r) = false).
    { destruct l as [r e| | |]; [|right; discriminate..]. destruct (is_lost (rank_of u r)) eqn:L; [left; eauto|right; intros ? ? X; injection X as <- _; exact L]. }
    destruct C as [[r [e [-> L]]]|C].
    + exists v. split; [exact R|]. inversion St as [s i e' t H M T| | |]; subst. destruct (f_rank _ _ _ _ F r H) as [[Lf _]|[Lb Pe]]; [congruence|].
      destruct (left_stays depth u v r e t Rv H M T Lb) as [Lt [Po [NG NT]]]. constructor; simpl.
      * apply (f_log _ _ _ _ F).
      * intros q Hq. destruct e; try apply (f_got _ _ _ _ F q Hq). edestruct NG. reflexivity.
      * intros q Hq. destruct e; try apply (f_running _ _ _ _ F q Hq). contradiction NT. reflexivity.
      * intros q Hq. unfold follows_rank. simpl. unfold has_posted, is_waiting at 1 2. rewrite (lb_phase _ _ Lt). simpl. destruct (Nat.eq_dec q r) as [->|NE].
        -- right. rewrite update_same, Po. auto.
        -- rewrite update_other by exact NE. apply (f_rank _ _ _ _ F q Hq).
    + destruct (every_live_step_is_followed W cfg depth input ok left_behind left_shares u l v u' Rv F St C) as [v' [St' [F' _]]]. exists v'. split; [|exact F'].
      eapply runs_on; [exact R|exact St'|]. destruct l as [r e| | |]; [|exact Logic.I|exact Logic.I|destruct A as [[]|[]]]. assert (H : r < W) by (inversion St; assumption).
      destruct A as [A|A]; [|simpl in A; rewrite (C r e eq_refl) in A; discriminate].
      destruct (f_rank _ _ _ _ F r H) as [[_ [Er _]]|[Lb _]]; [|pose proof (lb_lost _ _ Lb); rewrite (C r e eq_refl) in *; discriminate]. destruct e; try exact A. simpl in *. rewrite <- Er. exact A.
  - exists v. split; [exact R|]. exact (proj1 (every_loss_is_followed W left_behind lose_leaves left_shares u v r peer cause F H E)).
Qed.

Lemma planned_alike : forall u v r, follows_as W left_behind u v -> r < W -> steps_of (rank_of u r) = steps_of (rank_of v r).
Proof. intros u v r F H. destruct (f_rank _ _ _ _ F r H) as [[_ [-> _]]|[L _]]; [reflexivity|apply L]. Qed.

Theorem with_losses_the_steps_planned_do_not_depend_on_the_schedule : plan_alike W lossy_runs.
Proof.
  intros d d' s s' r P P' H. destruct (a_run_with_losses_follows_one_without d s P) as [v [R F]].
  destruct (a_run_with_losses_follows_one_without d' s' P') as [v' [R' F']].
  rewrite (planned_alike s v r F H), (planned_alike s' v' r F' H).
  exact (runs_alike d d' v v' r R R' H).
Qed.

Theorem with_losses_complete_ranks_have_planned_the_same_steps : complete_alike W lossy_runs.
Proof.
  intros d d' s s' r P P' H E E' O O'. destruct (a_run_with_losses_follows_one_without d s P) as [v [R F]].
  destruct (a_run_with_losses_follows_one_without d' s' P') as [v' [R' F']].
  assert (Live : forall u w, follows_as W left_behind u w -> is_ending (rank_of u r) = true -> ended_as (rank_of u r) = Some Complete -> rank_of u r = rank_of w r).
  { intros u w Fu Eu Ou. destruct (f_rank _ _ _ _ Fu r H) as [[_ [X _]]|[L _]]; [exact X|]. pose proof (lb_lost _ _ L) as X. rewrite (complete_is_not_lost _ Ou) in X. discriminate. }
  pose proof (Live s v F E O) as X. pose proof (Live s' v' F' E' O') as X'. rewrite X in E, O |- *. rewrite X' in E', O' |- *.
  exact (runs_complete_alike d d' v v' r R R' H E E' O O').
Qed.

End ReplayLoss.
