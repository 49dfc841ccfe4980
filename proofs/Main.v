(** The proved theorems on one page: the properties of spec/properties.md, by name and in the same order, for every number of ranks.

    A state is one that some schedule leads to ([reached]). Ranks read, collate, post, receive results and deliver in any order.
    At any moment they may fail, be urged or learn of lost peers, and consumers may take steps and leave. Each theorem restates
    theorems of the other files; README.md lists all of them. *)
Require Import List Arith Lia Bool Permutation Sorted QArith.
From ODB Require Import PlanSettling PlanDivision PlanPadding Plan.
From ODB Require Import Types Packing Grouping Alignment Layouts Runs Machine Local System Facts Keeps Protocol Ending Coupled Termination Instance Loss
  Shards Drawing Job Lively Gone Prompt Weight Joined Sizes Replay ReplayLoss Resume Epoch Updates Dealt.
Import ListNotations.
Open Scope nat_scope.

Section Ranks.
(** [W] ranks, each with its configuration, the depth of its queue and its samples. *)
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
(** There is at least one rank, every configuration meets [config_ok], and configurations with equal fingerprints are equal. *)
Hypothesis ok : setting_ok W cfg.

(** States that some schedule leads to. The ranks may have begun at the start of the epoch, or may have been loaded ([begins]). *)
Notation reached := (Resume.reached W cfg depth input).
Notation leads_on := (lossy_path W cfg depth input).
Notation steps s r := (steps_of (rank_of s r)).
Notation is_join_mode := (c_is_quota (cfg 0) = false /\ c_quota (cfg 0) = None).
Notation has_ended s r := (is_ending (rank_of s r) = true).
Notation is_alive s r := (is_lost (rank_of s r) = false).
Notation outcome s r := (ended_as (rank_of s r)).

Notation way s R := (all_that_is_reached_follows_a_sound_state W cfg depth input ok s R).

(** Step j is the same step on all ranks. In a round that two ranks have finished, both have made equally many steps. *)
Theorem ALIGN : forall s r q, reached s -> r < W -> q < W ->
  (forall j x y, nth_error (steps s r) j = Some x -> nth_error (steps s q) j = Some y ->
    s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y) /\
  (forall k, k < round (rank_of s r) -> k < round (rank_of s q) ->
    length (steps_in_round k (rank_of s r)) = length (steps_in_round k (rank_of s q))).
Proof.
  intros s r q R Hr Hq. split.
  - intros j x y. exact (with_losses_rounds_are_aligned W cfg depth input s r q j x y (way s R) Hr Hq).
  - intros k. exact (with_losses_every_rank_makes_the_same_number_of_steps_in_a_round W cfg depth input s r q k (way s R) Hr Hq).
Qed.

(** At every moment the samples in steps, in alignment, in the window and unread are the rank's input. *)
Theorem CONSERVE : forall s r, reached s -> r < W ->
  Permutation (samples_of (steps s r) ++ concat (aligned (rank_of s r)) ++ window (rank_of s r) ++ skipn (read (rank_of s r)) (input r)) (input r).
Proof. intros s r R. exact (with_losses_no_sample_goes_missing W cfg depth input s r (way s R)). Qed.

(** In join mode a rank whose outcome is COMPLETE has planned its whole input. If it is done and its consumer has not left, the
    consumer has been given the whole input. *)
Theorem COVER : forall s r, reached s -> r < W -> is_join_mode -> has_ended s r -> outcome s r = Some Complete ->
  Permutation (samples_of (steps s r)) (input r) /\
  (at_phase (rank_of s r) = DONE -> stopped (rank_of s r) = false ->
    Permutation (samples_of (taken (rank_of s r) ++ queue (rank_of s r))) (input r)).
Proof.
  intros s r R H [J Nq] E O. split.
  - exact (with_losses_a_complete_rank_has_planned_its_whole_input W cfg depth input s r (way s R) H J Nq E O).
  - intros D S. exact (with_losses_join_mode_covers W cfg depth input s r (way s R) H J Nq D O S).
Qed.

(** In any mode no position is in two steps of a rank. *)
Theorem ONCE : forall s r, reached s -> r < W -> NoDup (map pos (input r)) -> NoDup (map pos (samples_of (steps s r))).
Proof. intros s r R H Nd. apply (with_losses_no_sample_is_emitted_twice W cfg depth input s r (way s R) H Nd). Qed.

(** If a rank closes COMPLETE, so does every rank that ends without being lost, with the same number of steps. They are the fewest
    that reach the quota, unless some rank has planned its whole input. *)
Theorem QUOTA : forall s r q, reached s -> r < W -> q < W -> has_ended s r -> has_ended s q -> is_alive s q -> outcome s r = Some Complete ->
  outcome s q = Some Complete /\ length (steps s q) = length (steps s r) /\ closes_in_time W cfg input s r.
Proof. intros s r q R. exact (with_losses_quota_ranks_close_at_the_same_first_step W cfg depth input s r q (way s R)). Qed.

(** Whatever processes are gone, either something can go on by itself, or the loader of every process that lives is done or delivers
    to a trainer inside a step that never ends. *)
Theorem FREE : (forall r, r < W -> 1 <= depth r) -> forall gone s, reached s ->
  goes_on W cfg depth input gone s \/
  forall r, r < W -> gone r = false ->
    at_phase (rank_of s r) = DONE \/ at_phase (rank_of s r) = DRAIN /\ running s r = true /\ never_ends W gone s r.
Proof. intros D gone s R. exact (every_live_loader_ends_or_its_trainer_is_in_a_step_that_never_ends W cfg depth input ok D gone s (way s R)). Qed.

(** No schedule is longer than [bound] + W transitions, if it begins while no trainer is inside a step, as an epoch does, and a job that is
    loaded. There are at most as many steps, and at most as many rounds, as all ranks have samples; in updates of p rounds, at most p rounds
    for each sample, and p - 1 more ([most_rounds]). *)
Theorem TERM : (forall s0 n s, begins W cfg depth input s0 -> (forall r, r < W -> running s0 r = false) -> leads_on s0 n s -> n <= bound W cfg input + W) /\
  forall s r, reached s -> r < W ->
    length (steps s r) <= total W input /\ round (rank_of s r) <= most_rounds W cfg input /\ length (log s) <= 2 * most_rounds W cfg input + 2 /\
    (c_updates (cfg 0) = None -> most_rounds W cfg input = total W input).
Proof.
  split; [exact (wherever_ranks_begin_every_schedule_ends_within_the_bound W cfg depth input ok)|]. intros s r R H. destruct (way s R) as [h0 [v [So F]]].
  destruct (follows_frame W s v r F H) as [-> [_ [-> _]]]. rewrite (f_log _ _ _ _ F). destruct (steps_rounds_and_exchanges_are_bounded W cfg depth input ok v r So H) as [A [B C]].
  exact (conj A (conj B (conj C (without_updates_rounds_are_no_more_than_samples W cfg input)))).
Qed.

(** After a rank has failed in a round, every rank that ends without being lost does so in that round or the next, and all alike. The
    outcome names a rank that did fail and its cause, or is a mismatch of configurations that do differ. Another outcome is possible
    only in a round for which the failed rank had posted its offer before it failed. *)
Theorem ABORT : forall s n t r q, reached s -> leads_on s n t -> r < W -> q < W ->
  failure (rank_of s r) <> None -> is_ending (rank_of s r) = false -> has_ended t q -> is_alive t q ->
  (round (rank_of t q) = round (rank_of s r) \/ round (rank_of t q) = S (round (rank_of s r))) /\
  (exists o, outcome t q = Some o /\ outcome_true W cfg t o /\
    (ends_by AFailure o \/ had_offered AFailure (rank_of s r) /\ round (rank_of t q) = round (rank_of s r))) /\
  (forall i, i < W -> has_ended t i -> is_alive t i ->
    outcome t i = outcome t q /\ round (rank_of t i) = round (rank_of t q) /\ length (released_of (rank_of t i)) = length (released_of (rank_of t q))).
Proof.
  intros s n t r q R L Hr Hq F E Et A.
  pose proof (with_losses_a_failure_or_a_stop_ends_every_other_rank_in_its_round_or_the_next W cfg depth input ok AFailure s n t r q (way s R) L Hr Hq F E Et A) as [X Y].
  split; [exact X|]. split; [exact Y|]. intros i Hi Ei Ai.
  exact (ranks_that_have_ended_are_lost_or_agree W cfg depth input t i q (under_way_on W cfg depth input ok s n t L (way s R)) Hi Hq Ei Et Ai A).
Qed.

(** A step released on one rank is released, or planned and collated, on every rank. *)
Theorem RELEASE : forall s r q j, reached s -> r < W -> q < W -> j < length (released_of (rank_of s r)) ->
  j < length (released_of (rank_of s q)) \/ j < length (steps s q) /\ collated (rank_of s q) = true.
Proof. intros s r q j R. exact (with_losses_release_needs_every_rank_ready W cfg depth input s r q j (way s R)). Qed.

(** Once a consumer has stopped, no consumer takes more than one step beyond those it has taken. As after a failure, every rank that ends
    without being lost does so in the stop's round or the next. *)
Theorem STOP : forall s n t r q, reached s -> leads_on s n t -> r < W -> q < W -> stopped (rank_of s q) = true ->
  length (taken (rank_of t r)) <= length (taken (rank_of s q)) + 1 /\
  (is_ending (rank_of s q) = false -> has_ended t r -> is_alive t r ->
    (round (rank_of t r) = round (rank_of s q) \/ round (rank_of t r) = S (round (rank_of s q))) /\
    exists o, outcome t r = Some o /\ outcome_true W cfg t o /\
      (ends_by AStop o \/ had_offered AStop (rank_of s q) /\ round (rank_of t r) = round (rank_of s q))).
Proof.
  intros s n t r q R L Hr Hq S. split; [exact (with_losses_no_consumer_takes_more_than_one_step_beyond_one_that_stopped W cfg depth input ok s n t r q (way s R) L Hr Hq S)|].
  intros E Et A. exact (with_losses_a_failure_or_a_stop_ends_every_other_rank_in_its_round_or_the_next W cfg depth input ok AStop s n t q r (way s R) L Hq Hr S E Et A).
Qed.
End Ranks.

Section Shipped.
(** The shipped configuration, in either layout, every order, with any cost and any rule within the bounds of R3.3. *)
Variables (shape : layout) (C : nat -> nat) (W size ramp max_age print whole padding_share : nat).
Variables (limits : list nat) (first : nat -> nat) (accepts : nat -> nat -> nat) (is_quota : bool).
Variables (quota : option nat) (rule : offer -> nat) (windowed : nat -> bool) (depth : nat -> nat).
Variable input : nat -> list sample.
Hypothesis some : 1 <= W.
Hypothesis costs_grow : cost_ok C.
Hypothesis old : 1 <= max_age.
Hypothesis bounded : within_bounds rule.
Notation configured o := (fun _ : nat => shipped shape C whole padding_share limits first accepts size ramp max_age is_quota quota rule print o windowed).

(** It meets all the assumptions above. *)
Theorem ASSUMPTIONS : forall o, setting_ok W (configured o).
Proof.
  intros o. exact (ranks_with_the_shipped_configuration_meet_every_assumption shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule o windowed
    some costs_grow old bounded).
Qed.

(** The windows of the configuration itself, or those of updates of n samples, with n at least W. *)
Notation in_updates_or_not one cfg := (cfg = (fun _ : nat => one) \/ exists n, W <= n /\ cfg = (fun _ => in_updates W n one)).

Lemma windows_of : forall one cfg, in_updates_or_not one cfg -> c_shares one = false -> setting_ok W (fun _ => one) ->
  exists windows updates, setting_ok W cfg /\ cfg = fun _ => with_reading false windows updates one.
Proof.
  intros one cfg [->|[n [L ->]]] own ok; [exists (c_window one), (c_updates one); split; [exact ok|rewrite <- own; destruct one; reflexivity]|exists (own_window W n), (Some 2); split; [|reflexivity]].
  apply ranks_in_updates_meet_every_assumption; [exact some|exact L|exact (configs_ok W _ ok 0 some)].
Qed.

Notation in_portions_or_not one cfg := (cfg = (fun _ : nat => one) \/ exists p, 1 <= p /\ cfg = (fun _ => in_portions p one)).

Lemma portions_of : forall one cfg, in_portions_or_not one cfg -> c_shares one = false -> setting_ok W (fun _ => one) ->
  exists windows updates, setting_ok W cfg /\ cfg = fun _ => with_reading false windows updates one.
Proof.
  intros one cfg [->|[p [L ->]]] own ok; [exists (c_window one), (c_updates one); split; [exact ok|rewrite <- own; destruct one; reflexivity]|exists (fun _ _ => 1), (Some p); split; [|reflexivity]].
  apply ranks_in_portions_meet_every_assumption; [exact some|exact L|exact (configs_ok W _ ok 0 some)].
Qed.

(** Every group of two or more samples fits the budget in force in its round and the limits that shrink with that budget. Except in
    sampler order, at most a fixed share of the budget is padding. This holds in updates too. *)
Theorem BUDGET : forall o cfg s r, in_updates_or_not (configured o 0) cfg -> lossy_reachable W cfg depth input s -> r < W ->
  Forall (fun x => let b := budget_in_force W whole first accepts r (s_round x) in
    fits_in shape b (most_padding o padding_share b) (limits_in_force W whole limits first accepts r (s_round x)) (s_group x)) (steps_of (rank_of s r)).
Proof.
  intros o cfg s r U. destruct (windows_of _ _ U eq_refl (ASSUMPTIONS o)) as [windows [updates [ok ->]]].
  exact (every_batch_of_the_shipped_configuration_keeps_the_budget shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule o windowed depth input
    some costs_grow old false windows updates ok s r).
Qed.

(** With friendly sizes every group has a friendly number of samples, or none. This holds in updates too. *)
Theorem SIZES : forall friendly before cfg s r, sizes_ok friendly ->
  in_updates_or_not (sized friendly C whole padding_share limits first accepts size ramp max_age is_quota quota rule print before windowed) cfg ->
  lossy_reachable W cfg depth input s -> r < W -> Forall (fun x => is_friendly friendly (s_group x)) (steps_of (rank_of s r)).
Proof.
  intros friendly before cfg s r F U R H.
  destruct (windows_of _ _ U eq_refl) as [windows [updates [ok ->]]]; [apply ranks_with_sizes_meet_every_assumption; assumption|].
  pose proof (every_batch_of_ranks_with_sizes_is_friendly_and_keeps_the_budget friendly C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule before windowed
    depth input some F old false windows updates ok s r R H) as X. apply Forall_forall. intros x I. rewrite Forall_forall in X. apply (X x I).
Qed.
(** Both also hold if ranks share the order, however it is dealt: in turn, or an update by load, a portion to a round. *)
Theorem BUDGET_SHARED : forall o friendly before, sizes_ok friendly -> forall total order deal wish cfg,
  (forall k ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal k ws d) (seq d n)) -> begins_by_drawing W total cfg deal ->
  forall s r, shared_reachable W total cfg depth order deal wish s -> r < W ->
  (in_portions_or_not (configured o 0) cfg -> Forall (fun x => let b := budget_in_force W whole first accepts r (s_round x) in
    fits_in shape b (most_padding o padding_share b) (limits_in_force W whole limits first accepts r (s_round x)) (s_group x)) (steps_of (rank_of (base s) r))) /\
  (in_portions_or_not (sized friendly C whole padding_share limits first accepts size ramp max_age is_quota quota rule print before windowed) cfg ->
    Forall (fun x => is_friendly friendly (s_group x)) (steps_of (rank_of (base s) r))).
Proof.
  intros o friendly before F total order deal wish cfg Nx Fd s r R H. split; intros U.
  - destruct (portions_of _ _ U eq_refl (ASSUMPTIONS o)) as [windows [updates [ok ->]]]. set (c := with_reading false windows updates (configured o 0)).
    exact (every_batch_of_the_shipped_configuration_keeps_the_budget shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule o windowed depth _
      some costs_grow old true (first_windows (fun _ => c) deal c) updates (own_ok W _ deal ok) _ r (a_run_of_shared_shards_is_one_of_shards_of_ones_own W total _ depth order deal wish ok Nx Fd s R) H).
  - destruct (portions_of _ _ U eq_refl) as [windows [updates [ok ->]]]; [apply ranks_with_sizes_meet_every_assumption; assumption|].
    match type of ok with setting_ok _ (fun _ => ?x) => set (c := x) end. eapply Forall_impl; [|exact (every_batch_of_ranks_with_sizes_is_friendly_and_keeps_the_budget friendly C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule
      before windowed depth _ some F old true (first_windows (fun _ => c) deal c) updates (own_ok W _ deal ok) _ r (a_run_of_shared_shards_is_one_of_shards_of_ones_own W total _ depth order deal wish ok Nx Fd s R) H)]. intros x [X _]. exact X.
Qed.
End Shipped.

(** No partition of a window under a padded budget has fewer groups, if tokens are the only resource and all of them may be padding. *)
Theorem FEWEST : forall budget w P, Permutation (concat P) w -> Forall (Types.fits budget budget []) P -> length (compute_groups budget budget [] w) <= length P.
Proof. exact no_partition_under_the_budget_has_fewer_groups. Qed.

(** In join mode, without updates, a sample in the window of round k, on a rank that is not lost, is in a step of round k + A or earlier
    once the rank is past round k + A. *)
Theorem AGE : forall W cfg depth input, setting_ok W cfg -> (forall r, r < W -> c_updates (cfg r) = None) ->
  (forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) ->
  (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  forall s n t r x, lossy_reachable W cfg depth input s -> lossy_path W cfg depth input s n t -> r < W -> at_phase (rank_of s r) <> COUNT ->
  is_lost (rank_of s r) = false -> In x (window (rank_of s r)) -> round (rank_of s r) + c_max_age (cfg r) < round (rank_of t r) ->
  exists y, In y (steps_of (rank_of t r)) /\ In x (s_group y) /\ s_round y <= round (rank_of s r) + c_max_age (cfg r).
Proof. exact with_losses_a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest. Qed.

(** With the fullest first, an alignment lists its steps by falling cost (an idle step costs 0). In the order sampler a rank plans its
    input in order. *)
Theorem ORDER : (forall M gs target due, gauge_ok M -> StronglySorted (fun g h => cost_of M h <= cost_of M g) (fst (align M (fullest_first M) gs target due))) /\
  forall shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule windowed depth input,
  1 <= W -> cost_ok C -> 1 <= max_age -> within_bounds rule -> (forall r, r < W -> rising (input r)) -> forall s r,
  lossy_reachable W (fun _ => shipped shape C whole padding_share limits first accepts size ramp max_age is_quota quota rule print Sampler windowed) depth input s -> r < W ->
  samples_of (steps_of (rank_of s r)) = firstn (length (samples_of (steps_of (rank_of s r)))) (input r).
Proof.
  split; [exact the_steps_of_an_alignment_are_lined_up_by_falling_cost|].
  intros shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule windowed depth input S G A B I s r R H.
  apply (in_the_order_sampler_ranks_plan_their_input_in_order shape C W size ramp max_age print whole padding_share limits first accepts is_quota quota rule Sampler windowed depth input
    S G A B eq_refl I s r R H).
Qed.

(** Over any m steps that all ranks have planned, one after the other, the average over ranks of their scaled losses is the mean over all supervised tokens. *)
Theorem WEIGHT : forall W cfg depth input, setting_ok W cfg -> forall loss s r j m,
  (forall x, length (loss x) = sup x) -> reached W cfg depth input s -> r < W ->
  (forall q, q < W -> j + m <= length (steps_of (rank_of s q))) -> 0 < counted (rank_of s r) j m ->
  let world := window_of W loss s j m in
  let total := counted (rank_of s r) j m in
  Qeq (averaged world (fun b => scale_of_mean W total b * mean_loss b)%Q) (global_mean world) /\
  Qeq (averaged world (fun b => scale_of_sum W total b * sum_loss b)%Q) (global_mean world).
Proof.
  intros W cfg depth input ok loss s r j m L R. exact (with_losses_the_steps_train_on_the_global_mean W cfg depth input loss s r j m L (all_that_is_reached_follows_a_sound_state W cfg depth input ok s R)).
Qed.

Notation one_begins_the_other a b := (is_prefix a b \/ is_prefix b a).

(** Take two runs with one configuration and one input, whose sources answer alike ([reader] says when they end and how much a window has
    room for). Whatever the schedules, depths and failures, the steps that a rank plans in one run begin those it plans in the other. *)
Theorem REPLAY : forall W c src input, setting_ok W (fun _ => c) ->
  forall d d' s s' r, lossy_runs W c src input (replays W c src input) d s -> lossy_runs W c src input (replays W c src input) d' s' -> r < W ->
  one_begins_the_other (steps_of (rank_of s r)) (steps_of (rank_of s' r)).
Proof.
  intros W c src input ok. apply with_losses_the_steps_planned_do_not_depend_on_the_schedule; [exact ok| |exact (replay_step W c src input)|exact (the_steps_planned_do_not_depend_on_the_schedule W c src input ok)].
  intros d s R. exists fresh. exact (sound_of ok (replays_reachable W c src input d s R)).
Qed.

(** The shipped machine, in either layout, any order, with any cost, with friendly sizes or without, under budgets that may change
    ([ships_updates], which [what_ships_is_a_configuration_of_updates] and [ranks_with_sizes_are_of_updates] show). An update has n
    samples, n at least W, and each rank reads every W-th place of the common order. An update takes two rounds, of which the last makes
    its steps. Update u holds only samples at the places from u n up to (u + 1) n. Once a rank is past update u, it has planned all its
    samples at these places. Once all ranks are, they have planned each place once. *)
Theorem UPDATE : forall W n cfg depth input, 1 <= W -> W <= n -> ships_updates (in_updates W n) cfg ->
  (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  forall s, lossy_reachable W cfg depth input s ->
  (forall r x y, r < W -> In x (steps_of (rank_of s r)) -> In y (s_group x) -> exists u, s_round x = last_round u /\ u * n <= r + W * pos y < S u * n) /\
  (forall r y u, r < W -> is_past (last_round u) (rank_of s r) -> In y (input r) -> u * n <= r + W * pos y < S u * n ->
    exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = last_round u) /\
  (forall total u, (forall r i, r < W -> (i < length (input r) <-> r + W * i < total)) -> (forall r, r < W -> is_past (last_round u) (rank_of s r)) ->
    Permutation (concat (map (places_in W s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n))).
Proof.
  intros W n cfg depth input Hw Hn Sp Nu s R. destruct (what_ships_with_a_source_of_ones_own_meets_every_assumption W n cfg Hw Hn Sp) as [Ok [Jm [Su [Nf [Qu Sh]]]]]. assert (Up : forall r, r < W -> c_updates (cfg r) <> None) by (intros r H; rewrite (proj1 (Sh r H)); discriminate). split; [|split].
  - intros r x y. exact (an_update_holds_only_samples_at_its_places W cfg depth input Ok Jm Su Up Nf Qu Nu n Sh s r x y R).
  - intros r y u. exact (each_sample_at_the_places_of_an_update_is_in_it W cfg depth input Ok Jm Su Up Nf Qu Nu n Sh s r y u R).
  - intros total u T. exact (an_update_holds_exactly_what_lies_at_its_places W cfg depth input Ok Jm Su Up Nf Qu Nu n Sh total T s u R).
Qed.

(** The same if ranks share the order and each update is dealt by load, in portions, one to a round: an update takes p rounds, of which the
    first draws nothing and the last makes its steps. [loads k] are the tokens that the ranks are told they hold before round k, whatever
    they are. In update u a rank plans only what it draws of update u. Once it is past the update, it has planned all of that. Once all
    ranks are, they have planned each place of the update once. Step j is the same step on all ranks. And FREE, if an update has a sample for
    each rank, and three if there are several portions: whatever processes are gone, either something goes on, or a driver can tell its rank
    of a loss, or the loader of every process that lives is done or delivers to a trainer inside a step that never ends. *)
Theorem UPDATE_DEALT : forall W n p total cfg depth order loads wish, 1 <= W -> 2 <= p -> 1 <= total -> ships_updates (in_portions p) cfg ->
  (forall k, length (loads k) = W) ->
  let deal := fun k _ => by_load n p total loads k in
  (forall s, shared_reachable W total cfg depth order deal wish s ->
    (forall r x y, r < W -> In x (steps_of (rank_of (base s) r)) -> In y (s_group x) ->
      exists u, s_round x = last_of p u /\ In (place_of s r y) (part_of total n p loads u r)) /\
    (forall r u, r < W -> is_past (last_of p u) (rank_of (base s) r) -> Permutation (dealt_places p s u r) (part_of total n p loads u r)) /\
    (forall u, (forall r, r < W -> is_past (last_of p u) (rank_of (base s) r)) ->
      Permutation (concat (map (dealt_places p s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n))) /\
    (forall r q j x y, r < W -> q < W -> nth_error (steps_of (rank_of (base s) r)) j = Some x -> nth_error (steps_of (rank_of (base s) q)) j = Some y ->
      s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y)) /\
  (W <= n -> p = 2 \/ 3 * W <= n -> (forall r, r < W -> 1 <= depth r) -> forall gone s, shared_reachable W total cfg depth order deal wish s ->
    shared_job_goes_on W total cfg depth order deal wish gone s \/ (exists r, is_to_be_told W gone (base s) r) \/
    forall r, r < W -> gone r = false ->
      at_phase (rank_of (base s) r) = DONE \/ at_phase (rank_of (base s) r) = DRAIN /\ running (base s) r = true /\ never_ends W gone (base s) r).
Proof.
  intros W n p total cfg depth order loads wish Hw Hp Ht Sp Le deal.
  destruct (what_ships_meets_every_assumption_of_updates W (fun _ _ => 1) p cfg Hw ltac:(lia) ltac:(auto) Sp) as [Ok [Jm [Su [_ Up]]]].
  pose proof (fun r H => proj1 (Up r H)) as In_. split; [intros s R; split; [|split; [|split]]|].
  - intros r x y. exact (an_update_holds_only_what_its_rank_draws_of_it W total n p cfg depth order loads wish Ok Hp In_ Ht Le Jm Su s r x y R).
  - intros r u. exact (a_rank_past_an_update_trains_on_what_it_drew_of_it W total n p cfg depth order loads wish Ok Hp In_ Ht Le Jm Su s r u R).
  - intros u. exact (a_dealt_update_holds_exactly_what_lies_at_its_places W total n p cfg depth order loads wish Ok Hp In_ Ht Le Jm Su s u R).
  - intros r q j x y. apply (with_shared_shards_rounds_are_aligned W total cfg depth order _ wish Ok (deal_next W total n p cfg loads Ok Hp Le) (deal_first W total n p cfg loads Hp In_ Ht) s r q j x y R).
  - intros Hn C D gone s R.
    exact (with_shared_shards_every_live_loader_ends_or_its_trainer_is_in_a_step_that_never_ends W total cfg depth order _ wish Ok D (deal_next W total n p cfg loads Ok Hp Le)
      (deal_first W total n p cfg loads Hp In_ Ht) (a_rank_has_drawn_some_of_an_update W total n p cfg depth order loads wish Ok Hp In_ Ht Le Jm Su Hn C) gone s R).
Qed.

(** REPLAY also holds if a job is loaded from what its ranks saved, any number of times. If the number of ranks changes, what was trained
    on before and what a COMPLETE job of the last ranks plans are together the epoch, each item once. *)
Theorem RESUME : forall W c src input, setting_ok W (fun _ => c) -> (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  (forall d d' s s' r, lossy_runs W c src input (job W c src input) d s -> lossy_runs W c src input (job W c src input) d' s' -> r < W ->
    one_begins_the_other (steps_of (rank_of s r)) (steps_of (rank_of s' r))) /\
  (forall (A : Type) (order trained left : list A) d s, trained_on A order trained left -> serves A W c input left -> job W c src input d s ->
    c_is_quota c = false -> c_quota c = None ->
    (forall r, r < W -> is_ending (rank_of s r) = true /\ ended_as (rank_of s r) = Some Complete) ->
    Permutation (trained ++ items A W left (fun r => positions (rank_of s r))) order).
Proof.
  intros W c src input ok P. split.
  { apply with_losses_the_steps_planned_do_not_depend_on_the_schedule; [exact ok|exact (every_moment_of_a_job_is_sound W c src input ok P)|exact (job_goes_on W c src input)|exact (a_job_that_is_loaded_plans_the_steps_of_any_other W c src input ok P)]. }
  intros A order trained left d s. exact (over_any_number_of_ranks_each_item_is_planned_exactly_once A order trained left W c src input d s).
Qed.

(** With shared shards no place of the common order is in two steps of the job. Once all ranks are COMPLETE in join mode, each is in one. *)
Theorem DEAL : forall W total cfg depth order is_packed s, setting_ok W cfg -> (forall r, r < W -> c_updates (cfg r) = None) ->
  shared_reachable W total cfg depth order (deal_in_turn W total) (wish_by_tokens W total is_packed cfg) s ->
  NoDup (concat (map (planned_places s) (seq 0 W))) /\
  (c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
   (forall r, r < W -> is_ending (rank_of (base s) r) = true /\ ended_as (rank_of (base s) r) = Some Complete) ->
   Permutation (concat (map (planned_places s) (seq 0 W))) (seq 0 total)).
Proof.
  intros W total cfg depth order is_packed s ok Nu R. destruct (the_shipped_deal_meets_every_assumption W total) as [A B].
  assert (D : begins_by_drawing W total cfg (deal_in_turn W total)) by (left; split; [intros r H; apply (Rank.without_updates _ (Nu r H))|exact (fun ws => B 0 ws 0)]).
  split.
  - exact (no_place_is_in_two_steps_of_the_job W total cfg depth order _ _ ok A D s R).
  - exact (a_complete_job_has_planned_each_place_once W total cfg depth order _ _ ok A D s R).
Qed.

Notation is_unit T key p g := (exists k, In k (units_in_plan T key p) /\ Permutation g k).

(** Known lengths, packed or padded, on any terms. Samples stay on their ranks, are dealt out, or have keys that are dealt out. Each
    sample is in exactly one micro-batch, on its own rank if samples stay. Each micro-batch keeps the budget and the limits, except for a
    unit by itself if the terms allow one. Every rank has the same number of micro-batches, which meets the terms. An empty one exists
    only on a rank none of whose micro-batches has two units. Samples of one key are together. A plan is refused only under terms that
    allow one of the three reasons. Settling ends: no micro-batch may give anything any more or, given a cost that is enough for all, none
    exceeds it or the next finds no exchange. Both bisections of a padded division end too. *)
Theorem PLAN : (forall T key p rows, terms_ok T -> problem_ok p -> plan_of T key p = Some rows ->
  (Permutation (concat (concat rows)) (asked_of p) /\
    forall own, p = Stay own -> Forall2 (fun mine row => Permutation (concat row) mine) own rows) /\
  (forall row g, In row rows -> In g row ->
    (if t_is_padded T then padded g else Types.total g) <= t_budget T /\ is_within (t_limits T) g = true \/ t_is_alone T = true /\ is_unit T key p g) /\
  (length rows = ranks_of p /\ exists count, Forall (fun row => length row = count) rows /\
    (exists k, count = k * t_multiple T) /\ t_at_least T <= count /\ forall most, t_at_most T = Some most -> count <= most) /\
  (forall row g, In row rows -> In [] row -> In g row -> g = [] \/ is_unit T key p g) /\
  forall x y, key x = key y -> match p with
    | Stay own => forall mine, In mine own -> In x mine -> In y mine -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
    | Dealt all _ => In x all -> In y all -> exists row g, In row rows /\ In g row /\ In x g /\ In y g
    | Homes all _ => In x all -> In y all -> exists row, In row rows /\ In x (concat row) /\ In y (concat row)
    end) /\
  (forall T key p, plan_of T key p = None -> t_is_alone T = false \/ t_at_most T <> None \/ t_is_idle T = false) /\
  (forall cost room near enough swaps bs, has_ended cost room near enough swaps (settled cost room near enough swaps bs)) /\
  forall rows of budget limits l count more fuel low high found, high - low <= fuel ->
    set_apart rows of budget limits l count (fuel + more) low high found = set_apart rows of budget limits l count fuel low high found /\
    lower rows of budget limits l count (fuel + more) low high found = lower rows of budget limits l count fuel low high found.
Proof.
  split; [|split; [exact a_plan_is_refused_for_a_reason|split; [intros; apply settling_ends, le_n|]]].
  2: { intros. split; [apply setting_apart_ends|apply lowering_ends]; assumption. }
  intros T key p rows ok asked E. destruct (a_plan_is_right T key p rows ok asked E) as [P [L [[count [K F]] H]]]. rewrite Forall_forall in F.
  split; [auto|]. split; [|split; [|split]].
  - intros row g I J. destruct (F row I) as [_ [B _]]. rewrite Forall_forall in B. destruct (B g J) as [R|[A [_ U]]]; [left|auto].
    unfold is_kept in R. rewrite andb_true_iff, Nat.leb_le, samples_take in R. exact R.
  - split; [exact L|]. exists count. split; [|exact K]. apply Forall_forall. intros row I. apply (F row I).
  - intros row g I Z J. destruct (F row I) as [_ [_ Nh]]. specialize (Nh Z). rewrite Forall_forall in Nh. exact (Nh g J).
  - intros x y. exact (a_plan_keeps_keys_together T key p rows x y ok asked E).
Qed.
