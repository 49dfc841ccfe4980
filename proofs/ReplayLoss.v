(** REPLAY with losses: whatever ranks are lost, and whenever, the steps that are planned are those of a run without. *)
Require Import List Arith Lia Bool.
From ODB Require Import Types Alignment Machine Local Rank System Facts Loss Replay.
Import ListNotations.

Section ReplayLoss.
Variable W : nat.
Variable c : config.
Variable eager : nat -> bool.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W (fun _ => c).
Notation cfg := (fun _ : nat => c).
Notation replays := (Replay.replays W c eager input).
Notation ends_alike := (Replay.ends_alike eager input).

(** A run at the depth [depth] in which sources end as in REPLAY, and any ranks are told, at any moment, that a peer is lost. *)
Inductive lossy_replays (depth : nat -> nat) : sys -> Prop :=
| lossy_replay_start : lossy_replays depth (start cfg)
| lossy_replay_step : forall s l t, lossy_replays depth s -> System.step W cfg depth input s l t -> ends_alike s l -> lossy_replays depth t
| lossy_replay_loss : forall s r peer cause, lossy_replays depth s -> r < W -> is_ending (rank_of s r) = false ->
    lossy_replays depth (mkSys (update (rank_of s) r (lose peer cause (rank_of s r))) (got s) (pending s) (log s) (running s)).

(** A lost rank has read as much as the one that it follows, and still wants as much. *)
Lemma ends_are_followed : forall u v l, follows W u v -> (forall r e, l = LRank r e -> r < W) -> ends_alike u l -> ends_alike v l.
Proof.
  intros u v l F H A. destruct l as [r e| |]; try exact A. specialize (H r e eq_refl). destruct e as [xs en full| |x| | |cause|]; try exact A.
  simpl in *. destruct (f_rank _ _ _ F r H) as [[_ [<- _]]|[L _]]; [exact A|]. rewrite <- (l_read _ _ L), <- (l_wanted _ _ L). exact A.
Qed.

Theorem a_run_with_losses_follows_one_that_replays : forall depth u, lossy_replays depth u -> exists v, replays depth v /\ follows W u v.
Proof.
  intros depth u P. induction P as [|u l u' P [v [R F]] St A|u r peer cause P [v [R F]] H E].
  - exists (start cfg). split; [constructor|]. apply start_follows.
  - pose proof (replays_reachable W c eager input depth v R) as Rv.
    destruct (every_step_is_followed W cfg depth input ok u l v u' Rv F St) as [v' [St' [F' _]]]. exists v'. split; [|exact F'].
    eapply replay_step; [exact R|exact St'|]. eapply ends_are_followed; [exact F| |exact A]. intros r e ->. inversion St; assumption.
  - pose proof (replays_reachable W c eager input depth v R) as Rv. exists v. split; [exact R|].
    destruct (every_loss_is_followed W u v r peer cause F H E) as [F' _]. exact F'.
Qed.

Theorem with_losses_the_steps_planned_do_not_depend_on_the_schedule : forall d d' s s' r, lossy_replays d s -> lossy_replays d' s' -> r < W ->
  is_prefix (steps_of (rank_of s r)) (steps_of (rank_of s' r)) \/ is_prefix (steps_of (rank_of s' r)) (steps_of (rank_of s r)).
Proof.
  intros d d' s s' r P P' H. destruct (a_run_with_losses_follows_one_that_replays d s P) as [v [R F]].
  destruct (a_run_with_losses_follows_one_that_replays d' s' P') as [v' [R' F']].
  destruct (follows_frame W s v r F H) as [-> _]. destruct (follows_frame W s' v' r F' H) as [-> _].
  exact (the_steps_planned_do_not_depend_on_the_schedule W c eager input ok d d' v v' r R R' H).
Qed.

Theorem with_losses_complete_ranks_have_planned_the_same_steps : forall d d' s s' r, lossy_replays d s -> lossy_replays d' s' -> r < W ->
  is_ending (rank_of s r) = true -> is_ending (rank_of s' r) = true -> ended_as (rank_of s r) = Some Complete -> ended_as (rank_of s' r) = Some Complete ->
  steps_of (rank_of s r) = steps_of (rank_of s' r).
Proof.
  intros d d' s s' r P P' H E E' O O'. destruct (a_run_with_losses_follows_one_that_replays d s P) as [v [R F]].
  destruct (a_run_with_losses_follows_one_that_replays d' s' P') as [v' [R' F']].
  assert (Live : forall u w, follows W u w -> is_ending (rank_of u r) = true -> ended_as (rank_of u r) = Some Complete -> rank_of u r = rank_of w r).
  { intros u w Fu Eu Ou. destruct (f_rank _ _ _ Fu r H) as [[_ [X _]]|[L _]]; [exact X|]. pose proof (l_lost _ _ L) as X. unfold is_lost in X. rewrite Ou, andb_false_r in X. discriminate. }
  pose proof (Live s v F E O) as X. pose proof (Live s' v' F' E' O') as X'. rewrite X in E, O |- *. rewrite X' in E', O' |- *.
  exact (complete_runs_have_planned_the_same_steps W c eager input ok d d' v v' r R R' H E E' O O').
Qed.

End ReplayLoss.
