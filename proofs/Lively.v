(** FREE with shared shards, with losses. A job is the system of System.v with books ([Job.v]), and can do whatever that system can do. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Coupled Termination Age Loss Gone Shards Drawing Job.
Import ListNotations.

(** For a round that forms steps, a rank that has counted holds or draws a sample, or the order ends. *)
Definition feeds (W total : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample) (deal : nat -> (nat -> nat) -> nat -> nat -> list nat)
  (wish : nat -> nat -> nat -> list sample -> list sample -> nat) : Prop := forall s r ws, shared_reachable W total cfg depth order deal wish s -> r < W -> begun s r = true ->
  let u := rank_of (base s) r in let next := S (round u) in
  at_phase u = COUNT -> ended u = false -> nth_error (told s) (got (base s) r) = Some (Some ws) -> has_steps (cfg r) next = true ->
  1 <= length (window u) + length (share_of deal s r next ws) \/ far_of W deal s r next ws = total.

(** So it is if a rank that wants a sample is dealt one, unless all that is left is dealt, and a rank that holds none wants one. *)
Theorem ranks_that_want_are_fed : forall W total cfg depth order deal wish, setting_ok W cfg ->
  (forall k ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal k ws d) (seq d n)) ->
  (forall k ws d r, r < W -> 1 <= ws r -> 1 <= length (deal k ws d r) \/ total <= d + length (dealt_out W deal k ws d)) ->
  (forall r k d w, r < W -> 1 <= wish r k d w []) -> (forall r, r < W -> has_steps (cfg r) 0 = true) -> feeds W total cfg depth order deal wish.
Proof.
  intros W total cfg depth order deal wish ok deal_next deal_feeds wish_some begins s r ws R Hr Bg u next Ph En To _.
  assert (B : books W total cfg deal wish s) by (apply (shared_books W total cfg depth order deal wish ok deal_next); [left; split; [exact begins|exact (fun ws r => deal_feeds 0 ws 0 r)]|exact R]).
  pose proof (b_rank _ _ _ _ _ _ B r Hr) as Bk. destruct (b_want _ _ _ _ _ _ _ Bk Ph) as [_ Wa]. destruct (Wa En) as [Wi Wt]. fold u in Wi.
  destruct (window u) as [|x l] eqn:Wn; [|left; simpl; lia].
  assert (L : 1 <= ws r) by (rewrite (Wt ws To); exact (Wi (fun k d w => wish_some r k d w Hr) eq_refl)).
  destruct (deal_feeds next ws (upto s r) r Hr L) as [F|F]; [left; exact F|right].
  pose proof (dealt_within W total deal deal_next next ws (upto s r)). unfold far_of.
  assert (upto s r <= total) by (rewrite (b_upto _ _ _ _ _ _ _ Bk Bg); apply (no_more_is_drawn_than_there_is W total), deal_next). lia.
Qed.

Section Lively.
Variables (W total : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample).
Variable deal : nat -> (nat -> nat) -> nat -> nat -> list nat.
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis deep : forall r, r < W -> 1 <= depth r.
Hypothesis deal_next : forall k ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal k ws d) (seq d n).
Hypothesis deal_first : begins_by_drawing W total cfg deal.
(** For a round that forms steps a rank holds or draws a sample, or the order ends. *)
Hypothesis fed : feeds W total cfg depth order deal wish.

Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation shared_step := (shared_step W total cfg depth order deal wish).
Notation own := (shared_config cfg deal).
Notation content := (content order).
Notation step s := (System.step W own depth (fun q => content (places s q))).

Notation own_is_ok := (own_ok W cfg deal ok).

Definition is_of (r : nat) (l : label) : Prop := match l with LRank i _ | LDrawn i _ _ => i = r | _ => False end.

(** A transition with a label that meets [P] is possible. *)
Definition goes_on (P : label -> Prop) (s : shared_sys) : Prop := exists l s', P l /\ shared_step s l s'.

(** A rank that has not begun begins. *)
Lemma a_rank_begins : forall s r, shared_reachable s -> r < W -> begun s r = false -> is_lost (rank_of (base s) r) = false ->
  failure (rank_of (base s) r) = None /\ exists last s', shared_step s (LRank r (SamplesRead [] last false)) s'.
Proof.
  intros s r R Hr Bg Nl. destruct (b_fresh _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ (shared_books W total cfg depth order deal wish ok deal_next deal_first s R) r Hr) Bg) as [Hs0 [[Fr|[p [c Fr]]] [_ [_ [Up _]]]]];
    [|rewrite Fr in Nl; unfold lose in Nl; rewrite initial_goes_on in Nl; discriminate]. destruct (own_begins_by_reading cfg deal r Hs0) as [Pi Wi]. split; [rewrite Fr; reflexivity|].
  set (mine := share_of deal s r 0 (first_wants cfg)). set (far := far_of W deal s r 0 (first_wants cfg)).
  assert (Em : mine = deal 0 (first_wants cfg) 0 r) by (unfold mine, share_of; rewrite Up; reflexivity).
  exists (far =? total). assert (B : exists b, begins W cfg depth order deal s r mine (far =? total) b).
  { unfold begins. destruct (far =? total); [|eauto]. destruct mine as [|p rest] eqn:E; eexists.
    - apply StepRank with (t := post (own r) r (moved (depth r) (rank_of (base s) r) (SamplesRead [] true false))); [exact Hr| |].
      + simpl. rewrite update_same, Fr. split; [reflexivity|]. split; [reflexivity|]. split; [auto|discriminate].
      + apply granted_event. rewrite Fr. split; [rewrite Wi; lia|]. split; [apply Nat.le_0_l|]. split; [discriminate|auto].
    - apply StepDrawn; [exact Hr|]. unfold may_draw. rewrite update_same, content_length, Fr. split; [reflexivity|]. split; [reflexivity|]. split; [apply Nat.le_refl|]. split; [reflexivity|]. right.
      split; [exact Pi|]. split; [discriminate|]. split; [rewrite Wi, <- Em; reflexivity|reflexivity]. }
  destruct B as [b B]. eexists. apply SharedBegins with (b := b); assumption.
Qed.

(** If the system whose input is what the ranks have drawn can do something, so can the job: the same, or else a read by the rank in
    question, or a result with the draw that belongs to it. *)
Lemma the_job_goes_on : forall (P : label -> Prop) s l b, shared_reachable s -> step s (base s) l b -> P l ->
  match l with LRank r _ | LDrawn r _ _ => is_lost (rank_of (base s) r) = false | _ => True end ->
  match l with LRank r (SamplesRead _ _ _) => failure (rank_of (base s) r) = None | LDrawn r _ _ => at_phase (rank_of (base s) r) = COUNT | _ => True end ->
  (forall r, is_of r l -> (forall x, P (LRank r (Got x))) /\ (failure (rank_of (base s) r) = None -> forall xs en, P (LRank r (SamplesRead xs en false)))) ->
  goes_on P s.
Proof.
  intros P s l b R St Pl Nl Sv Cl. pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_first s R) as B.
  assert (Rb := a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_first s R).
  assert (Begun : forall r, r < W -> is_of r l -> is_lost (rank_of (base s) r) = false -> goes_on P s \/ begun s r = true).
  { intros r Hr Ir Lr. destruct (begun s r) eqn:Bg; [auto|left]. destruct (a_rank_begins s r R Hr Bg Lr) as [F [la [s' S]]].
    exists (LRank r (SamplesRead [] la false)), s'. split; [apply (Cl r Ir), F|exact S]. }
  assert (Own : is_of_its_own s l -> goes_on P s) by (intros O; exists l; eexists; split; [exact Pl|]; eapply SharedGoesOn; eassumption).
  (* The sums are there: the rank draws and goes on from the round. *)
  assert (Count : forall r cs u, r < W -> is_of r l -> begun s r = true -> at_phase (rank_of (base s) r) = COUNT -> pending (base s) r = false ->
    nth_error (results (base s)) (got (base s) r) = Some (Counted cs) -> transition (own r) r (depth r) (rank_of (base s) r) (Got (Counted cs)) = Some u -> goes_on P s).
  { intros r cs u Hr Ir Bg Ph Pe Ex E. pose proof (b_rank _ _ _ _ _ _ B r Hr) as Bk. destruct (b_want _ _ _ _ _ _ _ Bk Ph) as [Wz Wa].
    pose proof (b_read _ _ _ _ _ _ _ Bk Bg) as Rd. rewrite Wz, Nat.add_0_r in Rd.
    destruct (Forall2_nth _ _ _ _ _ (b_told _ _ _ _ _ _ B) _ _ Ex) as [w [To Iw]]. destruct w as [ws|]; [|discriminate].
    set (next := S (round (rank_of (base s) r))). set (mine := share_of deal s r next ws). set (far := far_of W deal s r next ws). set (la := far =? total). set (v := rank_of (base s) r) in *.
    set (skips := ended v || is_nil mine && negb la). set (b1 := if skips then base s else System.drawn (base s) r (length mine) la).
    assert (D : draws_its_share W cfg depth order deal s r mine la b1).
    { unfold draws_its_share, b1. fold v. fold skips. destruct skips eqn:Sk; [reflexivity|]. apply StepDrawn; [exact Hr|]. unfold skips in Sk. apply orb_false_iff in Sk as [Sk1 Sk2].
      unfold may_draw. fold v. rewrite update_same, content_length, app_length, Rd. repeat split; auto. left. repeat split; auto.
      - unfold results in Ex. rewrite <- (map_length snd). apply nth_error_Some. congruence.
      - destruct mine; [right; destruct la; [reflexivity|discriminate]|left; discriminate]. }
    assert (V : rank_of b1 r = if skips then v else draws (length mine) la v) by (unfold b1; destruct skips; [reflexivity|apply drawn_same]).
    assert (E1 : exists t, transition (own r) r (depth r) (rank_of b1 r) (Got (Counted cs)) = Some t).
    { rewrite V. destruct skips; [eauto|]. simpl in E |- *. rewrite Ph in *. unfold count in *. simpl. destruct (negb _); [discriminate|eauto]. }
    destruct E1 as [t E1]. exists (LRank r (Got (Counted cs))). eexists. split; [apply (Cl r Ir)|]. eapply SharedCounted; [exact Hr|exact Bg|exact To|exact D|].
    apply StepRank with (t := t); [exact Hr| |exact E1]. simpl. split; [unfold b1; destruct skips; exact Pe|].
    split; [unfold b1; destruct skips; exact Ex|]. intros _. rewrite V. unfold has_more. destruct skips eqn:Sk; unfold skips in Sk.
    - apply orb_true_iff in Sk as [Sk|Sk]; [left; exact Sk|]. apply andb_true_iff in Sk as [Sk1 Sk2]. destruct (ended v) eqn:En; [auto|right].
      assert (Cv : coming v = next) by (unfold coming, in_count; rewrite Ph; apply Nat.add_1_r). rewrite Cv. change (has_steps (own r) next) with (has_steps (cfg r) next).
      destruct (has_steps (cfg r) next) eqn:Hs; [left|auto]. apply negb_true_iff, Nat.eqb_neq in Sk2.
      destruct (fed s r ws R Hr Bg Ph En To Hs) as [F|F]; [|contradiction]. fold v next mine in F. destruct mine; [simpl in F; lia|discriminate].
    - apply orb_false_iff in Sk as [_ Sk]. simpl. destruct la; [left; reflexivity|right; left]. destruct mine; [discriminate|simpl; lia]. }
  inversion St as [? r e t Hr M E|? x Pa Re|? r Hr Ru Tk|? r n la Hr D]; subst l; [|apply Own; exact Logic.I|apply Own; exact Logic.I|]; simpl in Nl;
    (destruct (Begun r Hr eq_refl Nl) as [G|Bg]; [exact G|]).
  - destruct e as [xs en full| |[a|cs|rs]| | | |]; try (apply Own; exact Bg).
    + (* a read of the next sample that is drawn *)
      pose proof (b_read _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B r Hr) Bg) as Rd. set (u := rank_of (base s) r) in *.
      assert (NG : forall y, SamplesRead xs en full <> Got y) by discriminate. destruct (own_event _ _ _ _ _ _ NG E) as [[[Wa _] _]|[_ X]]; [|discriminate].
      destruct (skipn (read u) (content (places s r))) as [|x rest] eqn:Sk.
      { exfalso. apply (f_equal (@length sample)) in Sk. rewrite skipn_length, content_length in Sk. simpl in Sk. lia. }
      exists (LRank r (SamplesRead [x] false false)). eexists. split; [apply (Cl r eq_refl), Sv|]. eapply SharedGoesOn; [simpl; auto|].
      apply StepRank with (t := post (own r) r (moved (depth r) u (SamplesRead [x] false false))); [exact Hr| |apply granted_event; simpl; repeat split; try lia; try discriminate; left; discriminate].
      simpl. fold u. rewrite Sk. repeat split; try discriminate. left. discriminate.
    + destruct M as [M1 [M2 _]]. destruct (count_reads _ _ _ _ _ _ E) as [Ph _]. exact (Count r cs t Hr eq_refl Bg Ph M1 M2 E).
  - destruct D as [_ [_ [_ [_ [[Ph [Pe [Gl _]]]|[Ph _]]]]]]; [|congruence].
    destruct (nth_error (results (base s)) (got (base s) r)) as [x|] eqn:Ex; [|apply nth_error_None in Ex; unfold results in Ex; rewrite map_length in Ex; lia].
    destruct (a_live_rank_is_followed W own depth _ own_is_ok (base s) r Rb Hr Nl) as [v [Rv [F [Er Ep]]]].
    assert (Acc : exists t, transition (own r) r (depth r) (rank_of (base s) r) (Got x) = Some t).
    { rewrite Er. unfold results in Ex. rewrite (f_log _ _ _ _ F), (f_got _ _ _ _ F r Hr) in Ex. rewrite Ep in Pe.
      exact (every_result_is_accepted W own depth _ v r x (sound_of own_is_ok Rv) Hr Pe Ex). }
    destruct Acc as [t E]. assert (C : exists cs, x = Counted cs) by (simpl in E; rewrite Ph in E; destruct x; [discriminate|eauto|discriminate]). destruct C as [cs ->].
    exact (Count r cs t Hr eq_refl Bg Ph Pe Ex E).
Qed.

(** Something goes on by itself, though these processes are gone: what the processes that live do, and no step that never ends. *)
Definition shared_job_goes_on (gone : nat -> bool) (s : shared_sys) : Prop :=
  goes_on (fun l => by_itself W (base s) l /\ lives W gone (base s) l /\ match l with LTrained r => ~ never_ends W gone (base s) r | _ => True end) s.

(** FREE, whatever processes are gone: something goes on, possibly a driver that tells its rank of a loss, or the loader of every live
    process is done or delivers to a trainer inside a step that never ends. *)
Theorem with_shared_shards_every_live_loader_ends_or_its_trainer_is_in_a_step_that_never_ends : forall gone s, shared_reachable s ->
  shared_job_goes_on gone s \/
  (exists r, is_to_be_told W gone (base s) r) \/
  forall r, r < W -> gone r = false -> at_phase (rank_of (base s) r) = DONE \/ (at_phase (rank_of (base s) r) = DRAIN /\ running (base s) r = true /\ never_ends W gone (base s) r).
Proof.
  intros gone s R. assert (Rb := a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_first s R).
  destruct (every_live_loader_ends_or_its_trainer_is_in_a_step_that_never_ends W own depth _ own_is_ok deep gone (base s) (on_its_way own_is_ok Rb)) as [[[l [b [St [Bi [Li Ne]]]]]|T]|A]; [left|auto..].
  eapply (the_job_goes_on _ s l b R St); [auto|..].
  - destruct l as [r e| |r|r n la]; auto; apply Li.
  - destruct l as [r e| |r|r n la]; auto. destruct e; auto.
  - intros r Ir. destruct l as [i e| |i|i n la]; simpl in Ir; try contradiction; subst i; split; intros; repeat split; auto; try apply Li.
Qed.

(** If no rank is lost, the job is in a state that a run without losses reaches. *)
Lemma nobody_is_lost : forall s, shared_reachable s -> (forall r, r < W -> is_lost (rank_of (base s) r) = false) ->
  exists v, reachable W own depth (fun q => content (places s q)) v /\ follows W (base s) v /\ forall r, r < W -> rank_of (base s) r = rank_of v r.
Proof.
  intros s R Nl. assert (Rb := a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_first s R).
  destruct (a_run_with_losses_follows_a_run_without W own depth _ own_is_ok (base s) Rb) as [v [Rv F]]. exists v. split; [exact Rv|]. split; [exact F|].
  intros r Hr. exact (live_is_followed W _ v r F Hr (Nl r Hr)).
Qed.

Lemma the_job_goes_on_as : forall (P : sys -> label -> Prop) s v, shared_reachable s -> (forall r, r < W -> is_lost (rank_of (base s) r) = false) -> follows W (base s) v ->
  (forall r, r < W -> rank_of (base s) r = rank_of v r) ->
  (forall l t, System.step W own depth (fun q => content (places s q)) v l t -> P v l -> P (base s) l) ->
  (forall l, P (base s) l -> match l with LRank r (SamplesRead _ _ _) => failure (rank_of (base s) r) = None | LDrawn r _ _ => at_phase (rank_of (base s) r) = COUNT | _ => True end) ->
  (forall r l, is_of r l -> P (base s) l -> (forall x, P (base s) (LRank r (Got x))) /\ (failure (rank_of (base s) r) = None -> forall xs en, P (base s) (LRank r (SamplesRead xs en false)))) ->
  can W own depth (fun q => content (places s q)) (P v) v -> goes_on (P (base s)) s.
Proof.
  intros P s v R Nl F E Pe Sv Cl [l [t [Pl St]]]. destruct (step_back W own depth _ (base s) v l t F Nl St) as [b Sb]. pose proof (Pe l t St Pl) as Pb.
  apply (the_job_goes_on _ s l b R Sb Pb); [|exact (Sv l Pb)|intros r Ir; exact (Cl r l Ir Pb)]. destruct Sb; auto.
Qed.

(** FREE with shared shards: while no consumer has left and no rank is lost, the job goes on by itself without urging, or every loader is
    done and every trainer has taken all its steps. Failures may have happened. *)
Theorem a_job_of_shared_shards_never_deadlocks : forall s, shared_reachable s -> (forall r, r < W -> is_lost (rank_of (base s) r) = false) ->
  (forall r, r < W -> stopped (rank_of (base s) r) = false) -> goes_on (unaided (base s)) s \/ forall r, r < W -> finished (base s) r.
Proof.
  intros s R Nl NS. destruct (nobody_is_lost s R Nl) as [v [Rv [F E]]].
  destruct (the_coupled_system_never_deadlocks W own depth _ own_is_ok deep v (sound_of own_is_ok Rv)) as [G|Fin]; [intros r Hr; rewrite <- E by exact Hr; exact (NS r Hr)|left|right].
  - apply (the_job_goes_on_as _ s v R Nl F E); [| |intros r l Ir [U _]|exact G].
    + intros l t St [U V]. split; [exact U|]. destruct St as [s0 r e t Hr M T|s0 x P Rd|s0 r Hr Ru Tk|s0 r n la Hr D]; try exact V; [destruct e; try exact V|]; simpl in *; rewrite E by exact Hr; exact V.
    + intros l [_ V]. destruct l as [r e| |r|r n la]; auto. destruct e; auto.
    + destruct l as [i e| |i|i n la]; simpl in Ir; try contradiction; subst i; split; intros; split; simpl; auto.
  - intros r Hr. destruct (Fin r Hr) as [F1 [F2 F3]]. unfold finished. rewrite E by exact Hr. rewrite (f_running _ _ _ _ F r Hr). auto.
Qed.

(** STOP, FREE with shared shards: after a consumer has left, the job goes on, urged if need be, or every loader is done except those that
    drain to a trainer inside a step which a consumer that left never entered. *)
Theorem with_shared_shards_after_a_stop_every_loader_ends_or_its_trainer_waits : forall s, shared_reachable s -> (forall r, r < W -> is_lost (rank_of (base s) r) = false) ->
  goes_on (by_itself W (base s)) s \/ forall r, r < W -> at_phase (rank_of (base s) r) = DONE \/ (at_phase (rank_of (base s) r) = DRAIN /\ forsaken W (base s) r).
Proof.
  intros s R Nl. destruct (nobody_is_lost s R Nl) as [v [Rv [F E]]].
  destruct (after_a_stop_every_loader_ends_or_its_trainer_waits_for_the_one_that_left W own depth _ own_is_ok deep v (sound_of own_is_ok Rv)) as [G|Fin]; [left|right].
  - apply (the_job_goes_on_as (by_itself W) s v R Nl F E); [| |intros r l Ir _|exact G].
    + intros l t St B. destruct St as [s0 r e t Hr M T|s0 x P Rd|s0 r Hr Ru Tk|s0 r n la Hr D]; try exact B; [destruct e; try exact B|]; simpl in *; try (rewrite E by exact Hr; exact B).
      destruct B as [q [Hq B]]. exists q. rewrite E by exact Hq. auto.
    + intros l B. destruct l as [r e| |r|r n la]; auto. destruct e; auto.
    + split; simpl; auto.
  - intros r Hr. rewrite E by exact Hr. destruct (Fin r Hr) as [D|[D [Ru [q [Hq [S T]]]]]]; [auto|right]. split; [exact D|]. split; [rewrite (f_running _ _ _ _ F r Hr); exact Ru|].
    exists q. rewrite !E by assumption. auto.
Qed.

End Lively.
