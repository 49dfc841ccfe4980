(** The shipped configuration: the executable grouping and alignment of either layout and any order, with any cost that meets [cost_ok] and
    any rule within the bounds. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Order Layouts Runs Machine Local Rules System Facts Keeps Protocol Ending Coupled Termination.
Import ListNotations.

(** The window of round [k]. In the first [ramp] rounds it is halved once for each round of the ramp still to go. *)
Definition window_samples (size ramp k : nat) : nat := Nat.max 1 (Nat.div size (2 ^ (ramp - k))).

(** The budget and the limits of a round, given the agreed budget (R15.1): a batch shrinks as a whole. *)
Definition budget_of (whole : nat) (b : option nat) : nat := match b with Some n => Nat.min n whole | None => whole end.
Definition limits_of (whole : nat) (limits : list nat) (b : option nat) : list nat :=
  match b with
  | Some n => if n <? whole then map (fun limit => Nat.max 1 (Nat.div (limit * n) whole)) limits else limits
  | None => limits
  end.

(** What a rank accepts, as it offers it: [None] if that is no less than the largest budget (R15.2). *)
Definition offered (whole tokens : nat) : option nat := if tokens <? whole then Some tokens else None.

(** A rank that reads on keeps a group back if some group has less than half of the budget in force, so that the next window can fill it
    (R3.1). *)
Definition keeps_one (l : layout) (whole : nat) (b : option nat) (gs : list group) : bool :=
  existsb (fun g => 2 * tokens_of (gauge_of l tokens_cost) g <? budget_of whole b) gs.

Definition shipped (l : layout) (C : nat -> nat) (whole padding_share : nat) (limits : list nat) (first : nat -> nat) (accepts : nat -> nat -> nat)
  (size ramp max_age : nat) (is_quota : bool) (quota : option nat) (rule : offer -> nat) (print : nat) (o : order) (bounded : nat -> bool) : config :=
  mkConfig (fun b => form_in o l padding_share (budget_of whole b) (limits_of whole limits b)) (align_in o (gauge_of l C)) (fun _ => window_samples size ramp)
    is_quota quota max_age (ramped ramp rule) print (fun r => offered whole (first r)) (fun r k => offered whole (accepts r k)) bounded false (keeps_one l whole) None.

Theorem the_shipped_configuration_meets_every_assumption : forall l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded,
  cost_ok C -> 1 <= max_age -> within_bounds rule ->
  config_ok (shipped l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded).
Proof.
  intros l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded Co A Wb.
  pose proof (every_layout_and_cost_measures_groups_as_is_asked l C Co) as M.
  constructor; simpl; auto using in_every_order_an_alignment_has_the_target_number_of_steps,
    in_every_order_an_alignment_keeps_exactly_the_groups, in_every_order_no_step_is_left_idle, a_rule_lowered_by_the_ramp_lies_within_the_bounds;
    try (intros b w; apply in_every_order_groups_hold_exactly_the_window).
  - intros k gs t d D. destruct (carried_in o (gauge_of l C) k gs t d) as [way ->].
    apply nothing_due_is_carried_when_the_target_covers_the_due_groups, D.
  - intros _ k. unfold window_samples. lia.
Qed.

(** FEWEST: a rank keeps a group back if there is another group, and some group has less than half of the budget in force. *)
Theorem the_shipped_configuration_keeps_a_group_back_where_one_is_less_than_half_full :
  forall l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded b gs,
  groups_to_emit (shipped l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded) b gs < length gs <->
  2 <= length gs /\ exists g, In g gs /\ 2 * tokens_of (gauge_of l tokens_cost) g < budget_of whole b.
Proof.
  intros l C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o bounded b gs. unfold groups_to_emit. cbn [c_keeps shipped].
  assert (K : keeps_one l whole b gs = true <-> exists g, In g gs /\ 2 * tokens_of (gauge_of l tokens_cost) g < budget_of whole b).
  { unfold keeps_one. rewrite existsb_exists. split; intros [g [I L]]; exists g; (split; [exact I|apply Nat.ltb_lt, L]). }
  rewrite <- K. destruct (Nat.ltb_spec 1 (length gs)), (keeps_one l whole b gs); simpl; split; intros; try lia; intuition (try lia; discriminate).
Qed.

(** AGE in quota mode needs this. *)
Theorem shipped_windows_do_not_shrink : forall size ramp k j, k <= j -> window_samples size ramp k <= window_samples size ramp j.
Proof.
  intros size ramp k j L. unfold window_samples. apply Nat.max_le_compat_l. apply Nat.div_le_compat_l.
  split; [apply Nat.neq_0_lt_0, Nat.pow_nonzero; discriminate|apply Nat.pow_le_mono_r; [discriminate|lia]].
Qed.

Section Whole.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis deep : forall r, r < W -> 1 <= depth r.
Notation reachable := (System.reachable W cfg depth input).

(** COVER for trainers: if nothing fails, no consumer leaves and nothing more can happen, every trainer has trained on each sample of its
    rank's input exactly once. By TERM every schedule reaches such a state. *)
Theorem every_sample_is_trained_on_exactly_once : forall s, reachable s ->
  c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  (forall r, r < W -> c_print (cfg r) = c_print (cfg 0)) ->
  (forall r, r < W -> stopped (rank_of s r) = false /\ failure (rank_of s r) = None) ->
  ~ can W cfg depth input unurged s ->
  forall r, r < W -> at_phase (rank_of s r) = DONE /\ Permutation (emitted s r) (input r).
Proof.
  intros s R Jm Nq Pr Al St r H. destruct (the_coupled_system_never_deadlocks W cfg depth input ok deep s (sound_of ok R)) as [C|F]; [intros q Hq; apply Al, Hq|destruct C as [l [t [[U _] T]]]; destruct St; exists l, t; auto|].
  destruct (F r H) as [D [Ru Nt]]. split; [exact D|].
  assert (En : is_ending (rank_of s r) = true) by (unfold is_ending; rewrite D; reflexivity).
  destruct (ended_outcome W cfg depth input s r (sound_of ok R) H En) as [o [l [Hk O]]].
  assert (Oc : o = Complete).
  { pose proof (d_outcome _ _ s (sound_of ok R) o l Hk) as T. destruct o as [|q n|q c|q|p c]; [reflexivity| | | |]; exfalso; simpl in T.
    - destruct T as [T1 T2]. destruct (Al q T1). congruence.
    - destruct T as [T1 T2]. destruct (Al q T1). congruence.
    - destruct T as [i [T1 T2]]. apply T2, Pr, T1.
    - exact T. }
  subst o. destruct (Al r H) as [Ns _].
  pose proof (join_mode_covers W cfg depth input s r (sound_of ok R) H Jm Nq D O Ns) as P.
  assert (Q : queue (rank_of s r) = []).
  { destruct (queue (rank_of s r)) as [|x q] eqn:Q; [reflexivity|]. exfalso. apply Nt. split; [rewrite Q; discriminate|]. intros m Lm.
    pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I r H) as K.
    destruct (ended_current W cfg depth input s r (sound_of ok R) H En) as [Wh _]. rewrite (k_free _ _ _ _ _ _ K Ns), Wh, Hk in Lm. injection Lm as <-.
    destruct (history_complete (cfg 0) (results s) l Hk) as [-> _]. rewrite Wh in K. change (history (cfg 0) (results s)) with (whole cfg s).
    rewrite <- (k_steps _ _ _ _ _ _ K), map_length. unfold steps_of. rewrite Q, app_length. simpl. lia. }
  rewrite Q, app_nil_r in P. exact P.
Qed.

End Whole.
