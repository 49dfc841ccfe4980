(** The theorems are not vacuous: there is a setting that meets every assumption, with runs that complete, stop, fail, find that
    configurations differ, and lose a rank. Each run is computed by [perform]. *)
Require Import List Arith Lia Bool Sorted.
From ODB Require Import Types Machine Local Rules System Facts Protocol Coupled Layouts Runs Instance Updates Loss Replay Rest Resume Run.
Import ListNotations.

(** Two ranks with the shipped grouping, alignment and rule. Windows have 3 samples, some of which wait for a later round. *)
Definition of_lengths (lengths : list nat) : list sample := map (fun '(i, n) => mkSample i i n n []) (combine (seq 0 (length lengths)) lengths).
(** Fullest first. *)
Definition fullest (_ i j : nat) : bool := i <=? j.
(** No window is bounded in bytes. *)
Definition unbounded (_ : nat) : bool := false.
(** The whole budget, from the start on. *)
Definition whole_budget (_ : nat) : nat := 6.
Definition always (_ _ : nat) : nat := 6.
Definition small (is_quota : bool) (quota : option nat) (print : nat) (o : order) (windowed : nat -> bool) : config :=
  shipped Padded tokens_cost 6 1 [] whole_budget always 3 1 2 is_quota quota odb_rule print o windowed.
Definition join : config := small false None 0 (ByPlaces fullest) unbounded.
Definition quota (q : nat) : config := small true (Some q) 0 (ByPlaces fullest) unbounded.
Definition deep (r : nat) : nat := S r.
Definition shards (r : nat) : list sample := of_lengths (nth r [[1; 5; 2; 4; 3; 3; 1]; [2; 2; 2]] []).

Definition one_after_another (r : nat) : list choice := [CRead r 1 false false; CRead r 0 true false; CCollate r; CAnswer r; CTake r; CTrained r].
Definition usual : list choice := one_after_another 0 ++ one_after_another 1 ++ [CExchange].

(** Rank 1 has another configuration. *)
Definition odd (r : nat) : config := if r =? 1 then small false None 1 (ByPlaces fullest) unbounded else join.

Lemma small_ok : forall b q p o w, config_ok (small b q p o w).
Proof. intros. apply the_shipped_configuration_meets_every_assumption; [apply the_shipped_costs_meet_every_assumption|lia|apply the_default_rule_lies_within_the_bounds]. Qed.

Lemma small_ranks_ok : forall b q p o w, setting_ok 2 (fun _ => small b q p o w).
Proof. intros. constructor; auto. intros r _. apply small_ok. Qed.

Theorem the_assumptions_can_be_met : forall q,
  setting_ok 2 (fun _ => join) /\ setting_ok 2 (fun _ => quota q) /\ setting_ok 2 odd /\ c_print (odd 0) <> c_print (odd 1) /\
  (forall r, r < 2 -> 1 <= deep r) /\ (forall r i x, r < 2 -> nth_error (shards r) i = Some x -> pos x = i) /\
  (forall r, r < 2 -> NoDup (map pos (shards r))) /\ (forall r p k j, k <= j -> c_window (quota q) p k <= c_window (quota q) r j).
Proof.
  intros q. split; [apply small_ranks_ok|]. split; [apply small_ranks_ok|]. split.
  { constructor; [lia|intros [|[|r]] _; apply small_ok|]. intros [|[|r]] [|[|k]]; simpl; intros; try lia; try reflexivity; discriminate. }
  split; [discriminate|]. split; [intros r _; unfold deep; lia|]. split; [|split].
  - intros r i x H E. unfold shards in E. destruct r as [|[|r]]; [| |lia];
    repeat (destruct i as [|i]; [injection E as <-; reflexivity|]); destruct i; discriminate.
  - intros [|[|r]] H; [| |lia]; simpl; repeat (constructor; [simpl; intuition discriminate|]); constructor.
  - intros r p k j. apply shipped_windows_do_not_shrink.
Qed.

Definition ends (s : sys) : list (phase_name * option outcome_kind * list (nat * list nat)) :=
  map (fun r => let u := rank_of s r in (at_phase u, ended_as u, map (fun x => (s_round x, map len (s_group x))) (taken u))) [0; 1].

(** [n] of the usual choices, then [cs], then the usual choices and [later] until nothing more can happen. *)
Definition run (cfg : nat -> config) (n : nat) (cs later : list choice) : sys :=
  let next := perform 2 cfg deep shards in
  match play next cs (go_on next n usual (start cfg)) with
  | Some s => go_on next 400 (usual ++ later) s
  | None => start cfg
  end.

Lemma performed : forall cfg cs, forallb (fun c => negb (is_loss c)) cs = true -> forall s c t, In c cs -> perform 2 cfg deep shards s c = Some t ->
  reachable 2 cfg deep shards s -> reachable 2 cfg deep shards t.
Proof. intros cfg cs L s c t I P. apply (perform_reachable _ _ _ _ s c t); [|exact P]. rewrite forallb_forall in L. apply negb_true_iff, L, I. Qed.

Lemma run_reachable : forall cfg n cs later, forallb (fun c => negb (is_loss c)) (cs ++ later) = true -> reachable 2 cfg deep shards (run cfg n cs later).
Proof.
  intros cfg n cs later L. rewrite forallb_app in L. apply andb_prop in L as [L1 L2]. unfold run. destruct (play _ _ _) as [s|] eqn:P; [|constructor].
  apply go_on_keeps; [apply performed; rewrite forallb_app, L2; reflexivity|]. apply (play_keeps _ _ _ (performed cfg cs L1) _ _ P).
  apply go_on_keeps; [apply performed; reflexivity|constructor].
Qed.

Lemma run_lossy : forall cfg n cs later, lossy_reachable 2 cfg deep shards (run cfg n cs later).
Proof.
  intros cfg n cs later. assert (Z : lossy_reachable 2 cfg deep shards (start cfg)) by (exists 0; constructor).
  pose proof (fun s c t (_ : In c (usual ++ later)) => perform_lossy 2 cfg deep shards s c t) as K. unfold run. destruct (play _ _ _) as [s|] eqn:P; [|exact Z].
  apply go_on_keeps; [exact K|]. apply (play_keeps _ _ _ (fun s c t _ => perform_lossy 2 cfg deep shards s c t) _ _ P). apply go_on_keeps; [|exact Z].
  intros u c t _. apply perform_lossy.
Qed.

(** In round 1 rank 0 has a group less than half full, with 2 tokens, and offers to emit the other two. *)
Theorem a_rank_keeps_a_group_back : exists s o, reachable 2 (fun _ => join) deep shards s /\ posted (rank_of s 0) = Some (MOffer o) /\
  map (map len) (groups (rank_of s 0)) = [[2]; [4]; [5]] /\ o_groups_max o = 3 /\ o_groups_min o = Some 2.
Proof.
  exists (go_on (perform 2 (fun _ => join) deep shards) 16 usual (start (fun _ => join))). eexists.
  split; [apply go_on_keeps; [apply performed; reflexivity|constructor]|]. vm_compute. repeat split.
Qed.

(** That group is carried into round 2, the only group of rank 1 in round 1 is split to meet the target, and rank 1 idles at the end. *)
Theorem a_run_completes : exists s, reachable 2 (fun _ => join) deep shards s /\
  ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (1, [4]); (2, [3; 2]); (2, [3]); (3, [1])]);
            (DONE, Some Complete, [(0, [2]); (1, [2]); (1, [2]); (2, []); (2, []); (3, [])])].
Proof. exists (run (fun _ => join) 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity]. Qed.

(** The same in the order sampler. *)
Definition in_turn : config := small false None 0 Sampler unbounded.

Theorem a_run_in_the_order_sampler_completes : setting_ok 2 (fun _ => in_turn) /\ (forall r, r < 2 -> rising (shards r)) /\
  exists s, reachable 2 (fun _ => in_turn) deep shards s /\
  ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (1, [2]); (2, [4]); (2, [3; 3]); (3, [1])]);
            (DONE, Some Complete, [(0, [2]); (1, [2]); (1, [2]); (2, []); (2, []); (3, [])])].
Proof.
  split; [apply small_ranks_ok|]. split.
  - intros [|[|r]] H; [| |lia]; repeat (constructor; [|repeat (constructor; [simpl; lia|]); constructor]); constructor.
  - exists (run (fun _ => in_turn) 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity].
Qed.

(** Windows are bounded in bytes, and each is full with its first new sample, or at once if it has carried one. *)
Definition narrow : config := small false None 0 (ByPlaces fullest) (fun _ => true).
Definition sparing (r : nat) : list choice := CRead r 0 false true :: CRead r 1 false true :: one_after_another r.

Theorem a_run_with_windows_bounded_in_bytes_completes : setting_ok 2 (fun _ => narrow) /\ c_bounded narrow 0 = true /\
  exists s, reachable 2 (fun _ => narrow) deep shards s /\
  ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (2, [2]); (3, [4]); (4, [3]); (5, [3]); (6, [1])]);
            (DONE, Some Complete, [(0, [2]); (1, [2]); (2, [2]); (3, []); (4, []); (5, []); (6, [])])].
Proof.
  split; [apply small_ranks_ok|]. split; [reflexivity|].
  exists (go_on (perform 2 (fun _ => narrow) deep shards) 400 (sparing 0 ++ sparing 1 ++ [CExchange]) (start (fun _ => narrow))).
  split; [apply go_on_keeps; [apply performed; reflexivity|apply reach_start]|vm_compute; reflexivity].
Qed.

(** Updates of 3 samples, of which one rank gives 2 and the other 1, in turn. The second round of each update makes its steps. *)
Definition uneven : config := in_updates 2 3 (shipped Padded tokens_cost 6 1 [] whole_budget always 1 0 1 false None odb_rule 0 (ByPlaces fullest) unbounded).

Theorem a_run_of_uneven_updates_completes : setting_ok 2 (fun _ => uneven) /\ exists s, reachable 2 (fun _ => uneven) deep shards s /\
  ends s = [(DONE, Some Complete, [(1, [5]); (1, [1]); (3, [2]); (5, [4]); (5, [3]); (7, [3]); (9, [1])]);
            (DONE, Some Complete, [(1, [2]); (1, []); (3, [2; 2]); (5, []); (5, []); (7, []); (9, [])])].
Proof.
  split.
  - apply ranks_in_updates_meet_every_assumption; [lia|lia|]. apply the_shipped_configuration_meets_every_assumption;
      [apply the_shipped_costs_meet_every_assumption|lia|apply the_default_rule_lies_within_the_bounds].
  - exists (run (fun _ => uneven) 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity].
Qed.

(** The second step reaches a quota of 4 samples. A quota of 8 is not reached, because rank 1 runs dry. *)
Theorem a_run_ends_by_its_quota_and_one_by_a_dry_rank :
  (exists s, reachable 2 (fun _ => quota 4) deep shards s /\
    ends s = [(DONE, Some Complete, [(0, [1]); (1, [5])]); (DONE, Some Complete, [(0, [2]); (1, [2])])]) /\
  (exists s, reachable 2 (fun _ => quota 8) deep shards s /\
    ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (1, [4])]); (DONE, Some Complete, [(0, [2]); (1, [2]); (1, [2])])]).
Proof.
  split.
  - exists (run (fun _ => quota 4) 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity].
  - exists (run (fun _ => quota 8) 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity].
Qed.

(** Rank 0's consumer leaves after 2 steps; rank 1's takes one more. *)
Theorem a_run_is_stopped : exists s, reachable 2 (fun _ => join) deep shards s /\
  ends s = [(DONE, Some (Stopped 0 2), [(0, [1]); (1, [5])]); (DONE, Some (Stopped 0 2), [(0, [2]); (1, [2]); (1, [2])])].
Proof. exists (run (fun _ => join) 37 [CLeave 0] [CUrge 1]). split; [apply run_reachable; reflexivity|vm_compute; reflexivity]. Qed.

Theorem a_run_fails : exists s, reachable 2 (fun _ => join) deep shards s /\
  ends s = [(DONE, Some (Failed 1 7), [(0, [1]); (1, [5]); (1, [4])]);
            (DONE, Some (Failed 1 7), [(0, [2]); (1, [2]); (1, [2])])].
Proof. exists (run (fun _ => join) 37 [CFail 1 7] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity]. Qed.

Theorem a_run_finds_that_configurations_differ : exists s, reachable 2 odd deep shards s /\
  ends s = [(DONE, Some (Mismatch 1), []); (DONE, Some (Mismatch 1), [])].
Proof. exists (run odd 0 [] []). split; [apply run_reachable; reflexivity|vm_compute; reflexivity]. Qed.

(** Rank 1 is told that rank 0 is lost and takes no further step. Rank 0 takes one more, and is told of a loss too. *)
Theorem a_run_loses_a_rank : exists s, lossy_reachable 2 (fun _ => join) deep shards s /\
  ends s = [(DONE, Some (Lost None 8), [(0, [1]); (1, [5])]); (DONE, Some (Lost (Some 0) 9), [(0, [2])])].
Proof. exists (run (fun _ => join) 33 [CLose 1 (Some 0) 9] [CLose 0 None 8]). split; [apply run_lossy|vm_compute; reflexivity]. Qed.

(** Runs for REPLAY and RESUME. *)
Section Alike.
Variables (one : config) (src : nat -> reader).
Definition is_alike (s : sys) (c : choice) : bool :=
  match c with
  | CRead r n en full =>
      let u := rank_of s r in let rest := skipn (read u) (shards r) in let xs := firstn n rest in let left := room (src r) (window u) rest in
      (length xs <=? left) && (negb full || (length xs =? left) && (read u + length xs <? length (shards r))) &&
      Bool.eqb en (if is_eager (src r) then read u + length xs =? length (shards r) else negb full && (length xs <? wanted u))
  | _ => true
  end.

Definition replayed (s : sys) (c : choice) : option sys := if is_loss c || negb (is_alike s c) then None else perform 2 (fun _ => one) deep shards s c.

(** A property that every step with sources that answer alike keeps. *)
Definition kept (keeps : sys -> Prop) : Prop :=
  forall s l t, keeps s -> System.step 2 (fun _ => one) deep shards s l t -> ends_alike src shards s l -> keeps t.

Lemma replayed_keeps : forall keeps, kept keeps -> forall s c t, replayed s c = Some t -> keeps s -> keeps t.
Proof.
  intros keeps Kp s c t P R. unfold replayed in P. destruct (is_loss c || negb (is_alike s c)) eqn:A; [discriminate|].
  apply orb_false_iff in A as [L A]. apply negb_false_iff in A. destruct (perform_step 2 (fun _ => one) deep shards s c t L P) as [l [St [Dr Ev]]].
  eapply Kp; [exact R|exact St|]. destruct l as [r e| |i|i n la]; [|exact I|exact I|discriminate]. specialize (Ev r e eq_refl). destruct e as [xs en full| | | | | |]; try exact I.
  destruct c as [i n en' full'|i|i|i|i|i k|i| |i|i p k]; simpl in Ev; try discriminate;
    [|exfalso; repeat (match type of Ev with context[match ?x with _ => _ end] => destruct x end; try discriminate)..].
  destruct (_ && _); [|discriminate]. injection Ev as <- <- <- <-. unfold is_alike in A. apply andb_prop in A as [A A3]. apply andb_prop in A as [A1 A2].
  apply Nat.leb_le in A1. apply Bool.eqb_prop in A3. split; [exact A1|]. split; [|exact A3].
  intros ->. apply andb_prop in A2 as [A2 A4]. apply Nat.eqb_eq in A2. apply Nat.ltb_lt in A4. auto.
Qed.

Lemma replay_keeps : forall keeps, kept keeps -> forall cs s t, play replayed cs s = Some t -> keeps s -> keeps t.
Proof. intros keeps Kp cs. apply play_keeps. intros s c t _. apply replayed_keeps, Kp. Qed.

Lemma replay_on_keeps : forall keeps, kept keeps -> forall n cs s, keeps s -> keeps (go_on replayed n cs s).
Proof. intros keeps Kp n cs. apply go_on_keeps. intros s c t _. apply replayed_keeps, Kp. Qed.
End Alike.

(** Sources that report their end with their last sample; and windows with room for one sample. *)
Definition ample (_ : nat) : reader := mkReader true (fun _ _ => true).
Definition scarce (_ : nat) : reader := mkReader false (fun w _ => is_nil w).

Notation replays := (Replay.replays 2 join ample shards).
Notation job := (Resume.job 2 join ample shards).

(** REPLAY with windows bounded in bytes: the run above, in which each window is full if there is another sample. *)
Theorem a_run_with_windows_bounded_in_bytes_replays : exists s, Replay.replays 2 narrow scarce shards deep s /\
  ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (2, [2]); (3, [4]); (4, [3]); (5, [3]); (6, [1])]);
            (DONE, Some Complete, [(0, [2]); (1, [2]); (2, [2]); (3, []); (4, []); (5, []); (6, [])])].
Proof.
  exists (go_on (replayed narrow scarce) 400 (sparing 0 ++ sparing 1 ++ [CRead 0 1 true false; CRead 1 1 true false; CExchange]) (start (fun _ => narrow))).
  split; [|vm_compute; reflexivity]. apply replay_on_keeps; [|constructor]. intros u l t R St Al. eapply replay_step; eassumption.
Qed.

(** Both ranks have begun round 1, and rank 0 has read one more sample. *)
Definition saved : sys :=
  match play (replayed join ample) [CRead 0 1 false false; CRead 1 1 false false; CExchange; CAnswer 0; CAnswer 1; CExchange; CAnswer 0; CAnswer 1; CRead 0 1 false false] (start (fun _ => join)) with
  | Some s => s
  | None => start (fun _ => join)
  end.

Lemma saved_replays : replays deep saved.
Proof.
  unfold saved. destruct (play _ _ _) as [s|] eqn:E; [|constructor]. eapply replay_keeps; [|exact E|constructor]. intros u l t R St Al. eapply replay_step; eassumption.
Qed.

(** Rank 0 saves in round 1, after it has read two samples, one of which belongs to that round. *)
Theorem a_rank_saves : exists s, saves 2 join ample shards deep s 0 /\ save (rank_of s 0) = mkStart 1 1 false [] [1] 1 2 None /\ read (rank_of s 0) = 2.
Proof.
  exists saved. split; [constructor; [apply saved_replays|lia|split; [left|split]; vm_compute; reflexivity]|]. split; vm_compute; reflexivity.
Qed.

Definition alike (r : nat) : list choice := [CRead r 1 false false; CRead r 1 true false; CCollate r; CAnswer r; CTake r; CTrained r].

(** The job is loaded from what both ranks saved in round 1, and makes the steps of [a_run_completes]. *)
Theorem a_job_is_loaded_and_completes : exists s, job deep s /\ length (log s) = 7 /\
  ends s = [(DONE, Some Complete, [(0, [1]); (1, [5]); (1, [4]); (2, [3; 2]); (2, [3]); (3, [1])]);
            (DONE, Some Complete, [(0, [2]); (1, [2]); (1, [2]); (2, []); (2, []); (3, [])])].
Proof.
  assert (G : kept join ample (job deep)) by (intros u l t R St Al; eapply job_goes_on; eassumption).
  assert (J : job deep saved).
  { unfold saved. destruct (play _ _ _) as [s|] eqn:E; [|constructor]. eapply replay_keeps; [exact G|exact E|constructor]. }
  exists (go_on (replayed join ample) 400 (alike 0 ++ alike 1 ++ [CExchange]) (loaded join (rank_of saved))). split; [|split; vm_compute; reflexivity].
  apply replay_on_keeps; [exact G|]. change (rank_of saved) with (fun r => rank_of saved r). apply (job_is_loaded 2 join ample shards deep 1 (fun _ => deep) (fun _ => saved)).
  - intros r _. exact J.
  - intros [|[|r]] H; [| |lia]; (split; [split; [left|split]|]; vm_compute; reflexivity).
Qed.
