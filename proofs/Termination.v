(** TERM: a measure with an explicit start value falls on every transition, so every schedule, fair or not, ends. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled.
Import ListNotations.

(** ** The parts of the measure *)

Definition b2n (b : bool) : nat := if b then 1 else 0.

(** What a rank has left to do: samples to read, an end to find, a failure, a stop, an urge, collations, and steps to take. *)
Definition rank_measure (rounds total : nat) (inp : list sample) (s : state) : nat :=
  (length inp - read s) + (1 - b2n (ended s)) + (1 - b2n (is_some (failure s))) + (1 - b2n (stopped s)) + (1 - b2n (urged s)) +
  (2 * rounds + 1 - (2 * round s + b2n (collated s))) + 2 * (total - length (taken s)).

(** Over the first [n] ranks. *)
Notation over n f := (sum_over f (seq 0 n)).

Lemma over_le : forall f g n, (forall i, i < n -> f i <= g i) -> over n f <= over n g.
Proof. intros f g n H. apply sum_over_le. intros i I. apply in_seq in I as [_ I]. apply H, I. Qed.

Lemma over_lt : forall f g n i, i < n -> f i < g i -> (forall j, j < n -> f j <= g j) -> over n f < over n g.
Proof. intros f g n i Hi L H. apply sum_over_lt with (y := i); [apply in_seq; lia|exact L|]. intros j I. apply in_seq in I as [_ I]. apply H, I. Qed.

Lemma sum_nth_lengths : forall (gs : list group) n, over n (fun j => length (nth j gs [])) <= length (concat gs).
Proof.
  induction gs as [|g gs IH]; intros n; [induction (seq 0 n) as [|[|j] l IH]; simpl in *; lia|].
  destruct n as [|n]; [simpl; lia|]. cbn [seq sum_over]. rewrite <- seq_shift, sum_over_map. specialize (IH n). simpl in *. rewrite app_length. lia.
Qed.

Section Termination.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation step := (System.step W cfg depth input).
Context {h0 : origin}.
Notation sound := (Keeps.sound W cfg depth input (h0 := h0)).
Notation hist_of := (System.hist_from cfg h0).
Notation whole := (Facts.whole_from cfg h0).

(** The number of samples of all ranks. *)
Definition total : nat := over W (fun r => length (input r)).

Lemma planned_within_total : forall s, sound s -> h_samples (whole s) <= total.
Proof.
  intros s R. pose proof (so_second _ _ _ _ _ R) as S.
  assert (E : h_samples (whole s) = over (length (h_steps (whole s))) (fun j => over W (fun q => length (nth j (groups_of (rank_of s q)) [])))).
  { unfold h_samples. rewrite <- (sum_over_map _ _ (fun n => n)), <- (sum_over_map _ _ (fun n => n) (fun j => over W _)). f_equal. apply map_numbered. intros j x Hx.
    rewrite (n_true _ _ _ S j x Hx). unfold true_counts, sum_counts. rewrite (fold_add n_samples), sum_over_map by reflexivity. reflexivity. }
  rewrite E, (sum_over_swap _ _ (fun q j => length (nth j (groups_of (rank_of s q)) []))). apply over_le. intros q Hq.
  eapply Nat.le_trans; [apply sum_nth_lengths|].
  pose proof (Permutation_length (k_cons _ _ _ _ _ _ (g_core _ _ _ _ _ R q Hq))) as P. rewrite !app_length, firstn_length in P. unfold groups_of. rewrite concat_app, app_length. unfold samples_of in P. lia.
Qed.

Lemma steps_within_total : forall s, sound s -> length (h_steps (whole s)) <= total.
Proof.
  intros s R. eapply Nat.le_trans; [|apply (planned_within_total s R)]. pose proof (so_second _ _ _ _ _ R) as S.
  unfold h_samples. pose proof (n_work _ _ _ S) as F. induction F as [|x l Hx F IH]; simpl; lia.
Qed.

(** The most rounds of an epoch: each step ends the rounds of an update, and the last rounds may be without one. *)
Definition most_rounds : nat := update_rounds (cfg 0) * S total - 1.

Theorem without_updates_rounds_are_no_more_than_samples : c_updates (cfg 0) = None -> most_rounds = total.
Proof. intros U. unfold most_rounds, update_rounds. rewrite U. lia. Qed.

Theorem steps_rounds_and_exchanges_are_bounded : forall s r, sound s -> r < W ->
  length (steps_of (rank_of s r)) <= total /\ round (rank_of s r) <= most_rounds /\ length (log s) <= 2 * most_rounds + 2.
Proof.
  intros s r R H. pose proof (g_core _ _ _ _ _ R r H) as K.
  pose proof (steps_within_total s R) as B1. destruct (d_rounds _ _ _ R) as [B2 B3].
  assert (G : length (h_steps (hist_of s r)) <= length (h_steps (whole s)) /\ h_round (hist_of s r) <= h_round (whole s)).
  { destruct (whole_goes_on cfg h0 s r) as [[ext E] Rr]. rewrite E, app_length. lia. }
  rewrite <- (map_length shared), (k_steps _ _ _ _ _ _ K), (k_round _ _ _ _ _ _ K).
  assert (kind_ops (h_kind (whole s)) <= 2) by (destruct (h_kind (whole s)); simpl; lia).
  enough (h_round (whole s) <= most_rounds) by lia. unfold most_rounds. pose proof (ok_updates _ (configs_ok _ _ ok 0 (some_rank _ _ ok))) as Up.
  pose proof (Nat.mul_succ_div_gt (h_round (whole s)) (update_rounds (cfg 0)) ltac:(lia)).
  pose proof (Nat.mul_le_mono_l (S (h_round (whole s) / update_rounds (cfg 0))) (S total) (update_rounds (cfg 0)) ltac:(lia)). lia.
Qed.

(** ** The measure *)

Definition exchanges : nat := 2 * most_rounds + 2.

(** If windows are bounded in bytes, a rank may also be told, once for each window, that there is no room for more. *)
Definition spare (s : sys) (r : nat) : nat :=
  if c_bounded (cfg r) r then (exchanges - got s r) + b2n (0 <? wanted (rank_of s r)) else 0.

Definition measure (s : sys) : nat :=
  (exchanges - length (log s)) +
  over W (fun r => rank_measure most_rounds total (input r) (rank_of s r) + (exchanges - got s r) + b2n (running s r) + spare s r).

(** A rank's own measure falls with every event except a result or a full window. *)
Lemma own_measure_falls : forall s r e t, sound s -> r < W -> may cfg input s r e -> transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
  read t <= length (input r) -> round t <= most_rounds -> length (taken t) <= total ->
  match e with
  | Got _ => rank_measure most_rounds total (input r) t <= rank_measure most_rounds total (input r) (rank_of s r)
  | StepTaken => rank_measure most_rounds total (input r) t + 2 <= rank_measure most_rounds total (input r) (rank_of s r)
  | SamplesRead _ _ true => rank_measure most_rounds total (input r) t <= rank_measure most_rounds total (input r) (rank_of s r) /\ wanted t = 0 /\ wanted (rank_of s r) <> 0
  | _ => rank_measure most_rounds total (input r) t + 1 <= rank_measure most_rounds total (input r) (rank_of s r)
  end.
Proof.
  intros s r e t R H M E B1 B2 B3. pose proof (g_core _ _ _ _ _ R r H) as K.
  set (u := rank_of s r) in *. destruct (answer_or_own e) as [[x ->]|NG].
  { simpl in E. destruct x as [a|cs|rs]; destruct (at_phase u); try discriminate.
    - each_agreement E Bd Sr Ra Tg Ea; apply Nat.le_refl.
    - destruct (count_eq _ _ _ _ _ E) as [_ ->]. unfold rank_measure. simpl. destruct (collated u); simpl; lia.
    - destruct (failure_of rs); [|discriminate]. injection E as <-. apply Nat.le_refl. }
  destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> D]].
  2:{ exfalso. destruct e; try discriminate; simpl in M, D; fold u in M; destruct M as [M1 M2]; rewrite ?M1, ?M2 in D; try discriminate. destruct (at_phase u); try discriminate. contradiction. }
  destruct e as [xs en full| |x| | |cause|]; unfold rank_measure; simpl in B1, B2, B3, G |- *.
  - destruct G as [Wa [W2 _]]. destruct M as [_ [El [M _]]]. fold u in El.
    assert (En : ended u = true -> read u + wanted u = length (input r)) by apply (k_ended _ _ _ _ _ _ K).
    destruct full; [rewrite orb_true_r; split; [destruct (ended u), en; simpl; lia|auto]|].
    destruct xs as [|x xs]; [|simpl in *; destruct (ended u), en; simpl; lia]. destruct M as [M|[M|M]]; [easy| |discriminate]. subst en. specialize (El eq_refl).
    simpl in El. destruct (ended u); [specialize (En eq_refl); lia|simpl; lia].
  - rewrite G. simpl. lia.
  - edestruct NG. reflexivity.
  - destruct G as [x [q [Q _]]]. rewrite Q in *. simpl in *. rewrite app_length in *. simpl in *. lia.
  - destruct G as [G _]. rewrite G. simpl. lia.
  - destruct G as [_ G]. rewrite G. simpl. lia.
  - destruct M as [_ M]. fold u in M. rewrite M. simpl. lia.
Qed.

Lemma nothing_more_is_wanted : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t -> b2n (0 <? wanted t) <= b2n (0 <? wanted s).
Proof.
  intros c r d s e t NG E. pose proof (sa_window _ _ (transition_same _ _ _ _ _ _ NG E)) as X. destruct (wanted s) as [|n]; [destruct (X eq_refl) as [_ ->]; reflexivity|].
  destruct (0 <? wanted t); simpl; lia.
Qed.

Lemma spare_falls : forall s r e t g, (forall x, e <> Got x) -> transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
  (if c_bounded (cfg r) r then (exchanges - g) + b2n (0 <? wanted t) else 0) <= if c_bounded (cfg r) r then (exchanges - g) + b2n (0 <? wanted (rank_of s r)) else 0.
Proof. intros s r e t g NG E. destruct (c_bounded (cfg r) r); [|lia]. pose proof (nothing_more_is_wanted _ _ _ _ _ _ NG E). lia. Qed.

(** TERM: the measure falls on every transition, except that it may stay equal on a draw. *)
Theorem every_transition_lowers_the_measure : forall s l t, sound s -> step s l t -> measure t + (if is_draw l then 0 else 1) <= measure s.
Proof.
  intros s l t R St. enough (G : if is_draw l then measure t <= measure s else measure t < measure s) by (destruct (is_draw l); lia).
  assert (R' : sound t) by (eapply step_keeps_sound; eauto). destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr].
  - match type of R' with Keeps.sound _ _ _ _ ?x => set (s' := x) in * end.
    assert (Bd : read t <= length (input r) /\ round t <= most_rounds /\ length (taken t) <= total).
    { pose proof (k_read _ _ _ _ _ _ (g_core _ _ _ _ _ R' r H)) as Z1.
      destruct (steps_rounds_and_exchanges_are_bounded s' r R' H) as [Z2 [Z3 _]]. unfold s' in Z1, Z2, Z3. simpl in Z1, Z2, Z3. rewrite update_same in Z1, Z2, Z3.
      unfold steps_of in Z2. rewrite app_length in Z2. lia. }
    destruct Bd as [B1 [B2 B3]]. pose proof (own_measure_falls s r e t R H M E B1 B2 B3) as F.
    assert (Own : rank_measure most_rounds total (input r) (rank_of s' r) + (exchanges - got s' r) + b2n (running s' r) + spare s' r <
                  rank_measure most_rounds total (input r) (rank_of s r) + (exchanges - got s r) + b2n (running s r) + spare s r).
    { unfold s', spare. cbn [rank_of got running]. rewrite !update_same. destruct e as [xs en full| |x| | |cause|].
      3:{ rewrite !update_same. simpl in F. destruct (got_current W cfg depth input s r x R H M) as [G _].
          destruct (steps_rounds_and_exchanges_are_bounded s r R H) as [_ [_ L]]. unfold exchanges. destruct (c_bounded (cfg r) r), (0 <? wanted t), (0 <? wanted (rank_of s r)); simpl; lia. }
      all: pose proof (fun NG => spare_falls s r _ t (got s r) NG E) as Sp; specialize (Sp ltac:(intros; discriminate)); try (simpl in F; lia).
      - destruct full; simpl in F; [|lia]. destruct M as [_ [_ [_ M]]]. destruct (M eq_refl) as [-> _]. destruct F as [F [-> Wn]].
        destruct (wanted (rank_of s r)); [contradiction|]. simpl. lia.
      - rewrite update_same. simpl in M, F. rewrite M. simpl. lia. }
    unfold measure. apply Nat.add_lt_mono_l. apply over_lt with (i := r); [exact H|exact Own|].
    intros j Hj. destruct (Nat.eq_dec j r) as [->|NE]; [lia|]. unfold s', spare. cbn [rank_of got running].
    destruct e; rewrite !update_other by assumption; reflexivity.
  - unfold measure, spare. simpl. destruct (steps_rounds_and_exchanges_are_bounded _ 0 R' ltac:(pose proof (some_rank _ _ ok); lia)) as [_ [_ L]]. simpl in L. rewrite app_length in *. simpl in *. unfold exchanges in *. lia.
  - unfold measure, spare. simpl. apply Nat.add_lt_mono_l. apply over_lt with (i := r); [exact H|rewrite update_same, Ru; simpl; lia|].
    intros j Hj. destruct (Nat.eq_dec j r) as [->|NE]; [rewrite update_same, Ru; simpl; lia|rewrite update_other by assumption; lia].
  - unfold measure. simpl. apply Nat.add_le_mono_l, over_le. intros j Hj. destruct Dr as [Sh [En _]]. unfold rank_measure, spare, c_bounded. simpl.
    destruct (Nat.eqb_spec j d) as [->|NE]; [rewrite En, Sh, andb_false_r; destruct la; simpl; lia|destruct (c_in_bytes (cfg j) j), (c_shares (cfg j)), (ended (rank_of s j)); simpl; lia].
Qed.

(** A path of [n] transitions, not counting draws. *)
Inductive path : sys -> nat -> sys -> Prop :=
| path_here : forall s, path s 0 s
| path_on : forall s l t n u, step s l t -> path t n u -> path s ((if is_draw l then 0 else 1) + n) u.

Definition bound : nat := exchanges + W * (4 * most_rounds + 2 * total + 7) + total + over W (fun r => if c_bounded (cfg r) r then exchanges + 1 else 0).

Lemma measure_within_bound : forall s, (forall r, r < W -> running s r = false) -> measure s <= bound.
Proof.
  intros s Q. unfold measure, bound.
  assert (E : over W (fun r => rank_measure most_rounds total (input r) (rank_of s r) + (exchanges - got s r) + b2n (running s r) + spare s r) <=
    over W (fun r => (4 * most_rounds + 2 * total + 7) + (length (input r) + if c_bounded (cfg r) r then exchanges + 1 else 0))).
  { apply over_le. intros i Hi. rewrite (Q i Hi). unfold spare, rank_measure, exchanges, b2n.
    set (u := rank_of s i). destruct (c_bounded (cfg i) i), (ended u), (is_some (failure u)), (stopped u), (urged u), (collated u), (0 <? wanted u); lia. }
  rewrite (sum_over_add _ (fun _ => 4 * most_rounds + 2 * total + 7)), sum_over_const, (sum_over_add _ (fun r => length (input r))), seq_length in E. fold total in E. lia.
Qed.

Lemma path_lowers_the_measure : forall s n t, path s n t -> sound s -> n + measure t <= measure s.
Proof.
  induction 1 as [s|s l u n t St P IH]; intros R; [lia|]. pose proof (every_transition_lowers_the_measure s l u R St). specialize (IH (step_keeps_sound W cfg depth input ok s l u R St)). lia.
Qed.

End Termination.

Theorem every_schedule_ends_within_the_bound : forall W cfg depth input, setting_ok W cfg -> forall n s, path W cfg depth input (start cfg) n s -> n <= bound W cfg input.
Proof.
  intros W cfg depth input ok n s P. pose proof (path_lowers_the_measure W cfg depth input ok _ n s P (sound_of ok (reach_start W cfg depth input))).
  pose proof (measure_within_bound W cfg input (start cfg) (fun _ _ => eq_refl)). lia.
Qed.
