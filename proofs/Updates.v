(** UPDATE: if the rule keeps no group back on any rank, a round that forms steps holds exactly the samples of its window, on every rank.
    An update takes two rounds. The first reads nothing, so its window is empty; the window of the second is the rank's share of the
    update. Spec: R16. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Rules Types Alignment Layouts Runs Machine Local Rank System Facts Keeps Protocol Age Ending Coupled Termination Rounds Instance Loss.
Import ListNotations.

(** Where the window of round [k] begins in a rank's input, if no window is full by its bytes and nothing is carried. *)
Fixpoint begin_of (size : nat -> nat) (k : nat) : nat := match k with 0 => 0 | S j => begin_of size j + size j end.

Lemma begin_of_rises : forall size k j, k <= j -> begin_of size k <= begin_of size j.
Proof. intros size k j L. induction L; simpl; lia. Qed.

Lemma positions_of_a_part : forall (l : list sample) k, (forall i x, nth_error l i = Some x -> pos x = k + i) ->
  forall n m x, In x (firstn m (skipn n l)) -> k + n <= pos x < k + n + m.
Proof.
  intros l k P n m x I. apply In_nth_error in I as [j E]. apply nth_error_of_firstn in E as [L E].
  rewrite nth_error_of_skipn in E. rewrite (P _ _ E). lia.
Qed.

(** ** A rank's samples lie in the windows of its rounds *)

(** The first round of the update that round [k] belongs to. *)
Definition first_round (c : config) (k : nat) : nat := k / update_rounds c * update_rounds c.

Section Rounds.
Variable c : config.
Hypothesis some : 1 <= update_rounds c.

Lemma the_first_round_is_no_later : forall k, first_round c k <= k.
Proof. intros k. unfold first_round. rewrite Nat.mul_comm. apply Nat.mul_div_le. lia. Qed.

Lemma a_round_with_steps_is_the_last : forall k, has_steps c k = true -> exists q, S k = q * update_rounds c.
Proof. intros k H. apply Nat.eqb_eq in H. exists (S k / update_rounds c). pose proof (Nat.div_mod (S k) (update_rounds c) ltac:(lia)). lia. Qed.

Lemma a_later_update_begins_later : forall k j, has_steps c k = true -> k < j -> S k <= first_round c j.
Proof.
  intros k j H L. destruct (a_round_with_steps_is_the_last k H) as [q E]. unfold first_round. rewrite E in *. apply Nat.mul_le_mono_r, Nat.div_le_lower_bound; lia.
Qed.

Lemma the_first_round_stays : forall k, has_steps c k = false -> first_round c (S k) = first_round c k.
Proof.
  intros k H. apply Nat.eqb_neq in H. unfold first_round. set (p := update_rounds c) in *. f_equal.
  pose proof (Nat.div_mod (S k) p ltac:(lia)) as D. pose proof (Nat.mod_upper_bound (S k) p ltac:(lia)).
  apply (Nat.div_unique k p (S k / p) (S k mod p - 1)); lia.
Qed.
End Rounds.

Definition within (a b : nat) (xs : list sample) : Prop := forall x, In x xs -> a <= pos x < b.

(** [begins k] is where the window of round [k] begins in the rank's input, if nothing is carried from one update to the next. What is read
    in an update stays in the window until its last round, which alone has steps. *)
Definition steps_in_place (begins : nat -> nat) (c : config) (u : state) : Prop := forall x, In x (steps_of u) ->
  has_steps c (s_round x) = true /\ within (begins (first_round c (s_round x))) (begins (S (s_round x))) (s_group x).

Record in_place (begins : nat -> nat) (c : config) (u : state) : Prop := {
  p_steps : steps_in_place begins c u;
  p_aligned : (has_steps c (round u) = false -> aligned u = []) /\ within (begins (first_round c (round u))) (begins (S (round u))) (concat (aligned u));
  p_window : within (begins (first_round c (coming u))) (begins (S (coming u))) (window u) }.

(** A weaker form, which also holds of a lost rank: the samples that it holds lie after the windows of the updates that are over. *)
Record laid (begins : nat -> nat) (c : config) (u : state) : Prop := {
  l_steps : steps_in_place begins c u;
  l_held : forall y, In y (concat (aligned u)) \/ In y (window u) -> begins (first_round c (round u)) <= pos y }.

Lemma in_place_laid : forall begins c u, 1 <= update_rounds c -> (forall i j, i <= j -> begins i <= begins j) -> in_place begins c u -> laid begins c u.
Proof.
  intros begins c u Up Ri [P1 [_ P2] P3]. constructor; [exact P1|]. intros y [I|I]; [apply (P2 y I)|]. pose proof (P3 y I).
  enough (L : first_round c (round u) <= first_round c (coming u)) by (pose proof (Ri _ _ L); lia).
  apply Nat.mul_le_mono_r, Nat.div_le_mono; [lia|unfold coming; lia].
Qed.

(** An event other than a result keeps [in_place], if what is read belongs to the window. *)
Lemma what_is_held_stays_in_place : forall begins c0 c r d u e t, (forall y, e <> Got y) -> transition c r d u e = Some t -> in_place begins c0 u ->
  within (begins (first_round c0 (coming u))) (begins (S (coming u))) (reads e) -> in_place begins c0 t /\ coming t = coming u.
Proof.
  intros begins c0 c r d u e t NG E [P1 P2 P3] Re. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag.
  unfold aged in Ag. injection Ag as _ _ Aw Ao. assert (C : coming t = coming u) by (unfold coming; rewrite Ao, (own_event_keeps_in_count _ _ _ _ _ _ NG E); reflexivity).
  split; [|exact C]. unfold steps_in_place in P1. constructor; unfold steps_in_place; rewrite ?(sa_steps _ _ Sm), ?(sa_aligned _ _ Sm), ?Ao, ?C; [exact P1|exact P2|].
  rewrite Aw. intros x Ix. apply in_app_iff in Ix as [Ix|Ix]; [exact (P3 x Ix)|exact (Re x Ix)].
Qed.

Definition makes_steps (c : config) (a : offer) (n : nat) : Prop := is_bad a = false /\ o_stop_rank a = None /\ o_ready a = true /\ target c a = Makes n.

(** So does a result, if it makes a step of each group. *)
Lemma what_is_held_stays_in_place_with_an_answer : forall begins c r d u y t, config_ok c -> (forall i j, i <= j -> begins i <= begins j) ->
  (forall k gs t d, length gs <= t -> snd (c_align c k gs t d) = []) -> c_quota c = None ->
  (at_phase u <> COUNT -> aligned u = []) -> (at_phase u = COUNT -> plan u = []) ->
  (forall a n, y = Agreed a -> at_phase u = OFFER -> makes_steps c a n -> groups u = form_groups c u /\ length (groups u) <= n) ->
  transition c r d u (Got y) = Some t -> in_place begins c u ->
  in_place begins c t /\ (at_phase u = OFFER -> at_phase t = COUNT -> window t = if has_steps c (round u) then [] else window u).
Proof.
  intros begins c r d u y t Co Ri surplus Nq Ka Kp Enough E [P1 [P0 P2] P3]. pose proof (ok_updates c Co) as Up. simpl in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
  - destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]]. pose proof (held_agree _ _ _ _ _ _ E) as He. pose proof (agree_round _ _ _ _ _ _ E) as Hr.
    assert (Au : aligned u = []) by (apply Ka; discriminate). assert (Cu : coming u = round u) by (unfold coming, in_count; rewrite Ph; lia). rewrite Cu in *.
    destruct He as [[Pt _]|[Pt _]].
    { destruct (S2 Pt) as [Sa [Sw _]]. assert (Ct : coming t = round u) by (unfold coming; rewrite (not_in_count t Pt); lia).
      split; [|intros _ Q; contradiction]. constructor; unfold steps_in_place; rewrite ?S1, ?Sa, ?Au, ?Ct, ?Sw; simpl; auto. split; [auto|intros x []]. }
    destruct C as [_ Q2 _ _|? _ _ [Q2|Q2] _|_ _ _ _ [Q2|Q2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
    destruct (Enough a n eq_refl eq_refl) as [Gr Ln]; [unfold makes_steps; auto|].
    assert (Ct : coming t = S (round u)) by (unfold coming, in_count; rewrite Pt, Hr; lia).
    pose proof (formed_perm c Co u n Gr) as Pm. rewrite <- Al, <- Ca in Pm.
    assert (Wt : window t = if has_steps c (round u) then [] else window u).
    { rewrite Ca. unfold align_at. destruct (has_steps c (round u)); [exact (surplus (round u) (groups u) n (due_before c u) Ln)|reflexivity]. }
    split; [|auto]. constructor; unfold steps_in_place; rewrite ?S1, ?Hr, ?Ct; [exact P1| |].
    + split; [intros Hs; rewrite Al; unfold align_at; rewrite Hs; reflexivity|]. intros x Ix. apply P3, (Permutation_in _ Pm), in_or_app. auto.
    + rewrite Wt. destruct (has_steps c (round u)) eqn:Hs; [intros x []|]. rewrite (the_first_round_stays c Up _ Hs). intros x Ix. specialize (P3 x Ix). pose proof (Ri (S (round u)) (S (S (round u)))). lia.
  - destruct (count_cases _ _ _ _ _ E) as [Lc [Al [_ [_ [Pt New]]]]]. destruct (New (Kp eq_refl)) as [new [S2 [S3 [_ Rn]]]].
    pose proof (held_count _ _ _ _ _ E) as He. assert (Cut : cut c (gsum u) cs = length cs) by (unfold cut; rewrite Nq; reflexivity).
    cbv zeta in He. rewrite Cut in S3, He. rewrite Lc in S3, He. rewrite firstn_all in S3. rewrite skipn_all in He. simpl in He. unfold held in He. injection He as Hw _ _ Hr.
    assert (Ct : coming t = coming u) by (unfold coming, in_count; rewrite Ph; destruct Pt as [-> | ->]; rewrite Hr; lia).
    split; [|discriminate]. constructor; unfold steps_in_place; rewrite ?Ct, ?Hw; [|rewrite Al; split; [auto|intros x []]|exact P3].
    intros x Ix. rewrite S2 in Ix. apply in_app_iff in Ix as [Ix|Ix]; [exact (P1 x Ix)|].
    assert (Rx : s_round x = round u) by (rewrite Forall_forall in Rn; exact (Rn x Ix)).
    assert (Ig : In (s_group x) (aligned u)) by (rewrite <- S3; apply in_map, Ix).
    rewrite Rx. split; [destruct (has_steps c (round u)) eqn:Hs; [reflexivity|rewrite (P0 eq_refl) in Ig; destruct Ig]|].
    intros y Iy. apply P2. apply in_concat. exists (s_group x). auto.
  - destruct (failure_of rs) as [o|]; [|discriminate]. injection E as <-.
    split; [|discriminate]. unfold coming, in_count in P3. rewrite Ph in P3. constructor; unfold coming, steps_in_place; rewrite ?drain_steps, ?drained_is_not_in_count; [exact P1|exact (conj P0 P2)|exact P3].
Qed.

(** The samples of the update that ends with round [k]. *)
Definition of_update (begins : nat -> nat) (c : config) (k : nat) (y : sample) : bool := (begins (first_round c k) <=? pos y) && (pos y <? begins (S k)).

Lemma of_update_spec : forall begins c k y, of_update begins c k y = true <-> begins (first_round c k) <= pos y < begins (S k).
Proof. intros begins c k y. unfold of_update. rewrite andb_true_iff, Nat.leb_le, Nat.ltb_lt. reflexivity. Qed.

(** A rank is past round [k], and its unread samples lie after the window of round [k]; or it has planned its whole input. *)
Definition has_done (begins : nat -> nat) (inp : list sample) (k : nat) (u : state) : Prop :=
  k < round u /\ Permutation (samples_of (steps_of u) ++ concat (aligned u) ++ window u ++ skipn (read u) inp) inp /\ (skipn (read u) inp = [] \/ begins (S k) <= read u) \/
  Permutation (samples_of (steps_of u)) inp.

(** Its steps of round [k], the last of an update, then hold each sample of that update once. *)
Lemma what_a_rank_past_a_round_holds_of_it : forall begins c inp u k, 1 <= update_rounds c -> has_steps c k = true -> (forall i j, i <= j -> begins i <= begins j) ->
  (forall i x, nth_error inp i = Some x -> pos x = i) ->
  laid begins c u -> has_done begins inp k u -> Permutation (samples_of (steps_in_round k u)) (filter (of_update begins c k) inp).
Proof.
  intros begins c inp u k Up Hk Ri Nu [P1 P2] Pa.
  assert (Out : forall l, (forall y, In y l -> pos y < begins (first_round c k) \/ begins (S k) <= pos y) -> filter (of_update begins c k) l = []).
  { intros l A. apply (filter_all _ _ false). intros y I. apply not_true_is_false. rewrite of_update_spec. specialize (A y I). lia. }
  assert (Sf : filter (of_update begins c k) (samples_of (steps_of u)) = samples_of (steps_in_round k u)).
  { unfold samples_of, steps_in_round. unfold steps_in_place in P1. revert P1. generalize (steps_of u). induction l as [|x l IH]; intros A; [reflexivity|]. cbn [map concat filter].
    rewrite filter_app, IH by (intros y I; apply A; right; exact I). destruct (A x (or_introl eq_refl)) as [Hx Ax]. destruct (s_round x =? k) eqn:E.
    - apply Nat.eqb_eq in E. rewrite (filter_all _ _ true); [reflexivity|]. intros y I. apply of_update_spec. rewrite <- E. exact (Ax y I).
    - apply Nat.eqb_neq in E. rewrite Out; [reflexivity|]. intros y I. specialize (Ax y I). destruct (Nat.lt_ge_cases k (s_round x)) as [L|L].
      + pose proof (Ri _ _ (a_later_update_begins_later c Up k (s_round x) Hk L)). lia.
      + pose proof (Ri _ _ (a_later_update_begins_later c Up (s_round x) k Hx ltac:(lia))). lia. }
  rewrite <- Sf. destruct Pa as [[L [Pm Un]]|Pm]; [|apply Permutation_filter; exact Pm].
  apply (Permutation_filter _ (of_update begins c k)) in Pm. rewrite !filter_app in Pm. pose proof (Ri _ _ (a_later_update_begins_later c Up k (round u) Hk L)).
  rewrite (Out (concat _)), (Out (window u)), (Out (skipn _ _)), !app_nil_r in Pm; [exact Pm| | |]; intros y I.
  - destruct Un as [Un|Un]; [rewrite Un in I; destruct I|]. rewrite <- (firstn_all (skipn _ _)) in I. apply (positions_of_a_part _ 0 Nu) in I. lia.
  - specialize (P2 y (or_intror I)). lia.
  - specialize (P2 y (or_introl I)). lia.
Qed.

(** If an agreement makes steps, each rank has offered its whole window. *)
Lemma all_groups_are_agreed_on : forall W cfg depth input s r a, setting_ok W cfg -> c_updates (cfg r) <> None ->
  invariant (h0 := fresh) W cfg depth input s -> r < W -> may cfg input s r (Got (Agreed a)) -> let u := rank_of s r in at_phase u = OFFER -> forall n, makes_steps (cfg r) a n ->
  wanted u = 0 /\ groups u = form_groups (cfg r) u /\ length (groups u) <= n.
Proof.
  intros W cfg depth input s r a ok Up I H My u Ph n [B [_ [Ra Tg]]]. pose proof (g_core _ _ _ _ _ I r H) as K. fold u in K.
  destruct (answered_offer W cfg depth input s r a I H My Ph) as [o [os [A [Io [Po O]]]]]. destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [Rw [R3 [_ [Rg _]]]]].
  fold u in Rw, R3, Rg. split; [exact Rw|]. split; [exact R3|]. pose proof (ag_groups _ _ A o Io) as G. rewrite Rg in G.
  destruct (target_makes _ _ _ Tg) as [_ [_ ->]]. unfold count_steps. replace (is_some (c_updates (cfg r))) with true by (destruct (c_updates (cfg r)); [reflexivity|contradiction]).
  assert (Rd : o_round_min a = round u) by (destruct (Local.of_round _ _ _ _ O) as [O1 O2], (ag_round _ _ A o Io) as [A1 A2], (not_bad a B) as [_ [E _]]; fold u in O1, O2; lia).
  rewrite Rd. destruct (has_steps (cfg r) (round u)) eqn:Hs; [lia|]. rewrite R3. unfold groups_at. rewrite Hs. apply Nat.le_refl.
Qed.

(** Rank [r] has every W-th place of the common order: how many of its places lie before update [u] of n, and how many belong to [u]
    (R16.2). *)
Definition places_before (W n r u : nat) : nat := Nat.div (u * n + (W - 1 - r)) W.
Definition share (W n r u : nat) : nat := places_before W n r (S u) - places_before W n r u.

Lemma each_rank_has_some_of_an_update : forall W n r u, 1 <= W -> W <= n -> 1 <= share W n r u.
Proof.
  intros W n r u Hw Hn. unfold share, places_before. set (a := W - 1 - r).
  pose proof (Nat.div_add (u * n + a) 1 W ltac:(lia)) as D. pose proof (Nat.div_le_mono (u * n + a + 1 * W) (S u * n + a) W ltac:(lia) ltac:(simpl; lia)). simpl in *. lia.
Qed.

(** An update takes two rounds: the first reads nothing, and the second reads the share (R16.3). *)
Definition last_round (u : nat) : nat := S (2 * u).
Definition own_window (W n r k : nat) : nat := if S k mod 2 =? 0 then share W n r (k / 2) else 0.

Lemma the_last_round_alone_reads : forall W n r u, own_window W n r (2 * u) = 0 /\ own_window W n r (last_round u) = share W n r u.
Proof.
  intros W n r u. unfold own_window, last_round. replace (S (S (2 * u))) with (S u * 2) by lia. replace (S (2 * u)) with (1 + u * 2) by lia.
  rewrite Nat.mod_mul, Nat.mod_add, Nat.div_add by lia. auto.
Qed.

Lemma a_place_is_before : forall W n r u i, r < W -> (i < places_before W n r u <-> r + W * i < u * n).
Proof.
  intros W n r u i H. unfold places_before. split; intros L.
  - pose proof (Nat.mul_div_le (u * n + (W - 1 - r)) W ltac:(lia)) as D. pose proof (Nat.mul_le_mono_l _ _ W L) as M. rewrite Nat.mul_succ_r in M. lia.
  - apply Nat.div_le_lower_bound; [lia|]. rewrite Nat.mul_succ_r. lia.
Qed.

Section Updates.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
(** An alignment carries only surplus groups, and with updates there are none on any rank. *)
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].
Hypothesis updating : forall r, r < W -> c_updates (cfg r) <> None.
Hypothesis never_full : forall r, r < W -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false.
(** Only the last round of an update reads. *)
Hypothesis quiet : forall r k, r < W -> has_steps (cfg r) k = false -> c_window (cfg r) r k = 0.
Hypothesis numbered : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation reachable := (System.reachable W cfg depth input).
Notation begin r := (begin_of (c_window (cfg r) r)).

Lemma quiet_rounds : forall r k, r < W -> has_steps (cfg r) k = false -> begin r (S k) = begin r (first_round (cfg r) k).
Proof.
  intros r k H. pose proof (ok_updates _ (configs_ok _ _ ok r H)) as Up. induction k as [|k IH]; intros Hs; cbn [begin_of]; rewrite (quiet r _ H Hs), Nat.add_0_r.
  - unfold first_round. rewrite Nat.div_0_l by lia. reflexivity.
  - destruct (has_steps (cfg r) k) eqn:Hk.
    + rewrite (Nat.le_antisymm _ _ (the_first_round_is_no_later (cfg r) Up (S k)) (a_later_update_begins_later (cfg r) Up k (S k) Hk (Nat.lt_succ_diag_r k))). reflexivity.
    + rewrite (the_first_round_stays (cfg r) Up k Hk). exact (IH eq_refl).
Qed.

Lemma quiet_windows_are_empty : forall r k u, r < W -> has_steps (cfg r) k = false -> coming u = k -> in_place (begin r) (cfg r) u -> window u = [].
Proof.
  intros r k u H Hs C P. pose proof (p_window _ _ _ P) as Bw. rewrite C in Bw. destruct (window u) as [|x w]; [reflexivity|]. specialize (Bw x (or_introl eq_refl)).
  rewrite (quiet_rounds r k H Hs) in Bw. lia.
Qed.

Lemma everything_is_in_place : forall s, reachable s -> forall r, r < W -> let u := rank_of s r in
  in_place (begin r) (cfg r) u /\ (ended u = true \/ (read u + wanted u = begin r (S (coming u)) /\ begin r (coming u) <= read u)).
Proof.
  apply (each_rank_always W cfg depth input ok (fun r _ u => in_place (begin r) (cfg r) u /\
    (ended u = true \/ (read u + wanted u = begin r (S (coming u)) /\ begin r (coming u) <= read u)))).
  - intros r H. unfold coming. rewrite initial_in_count. split; [constructor; unfold steps_in_place, coming; rewrite ?initial_in_count; simpl; [intros x []|split; [auto|intros x []]|intros x []]|]. right. simpl. lia.
  - intros s i e t R H My NG E [B1 B4]. pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok s R) i H) as K. set (u := rank_of s i) in *.
    pose proof (held_transition _ _ _ _ _ _ NG E) as He. pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. unfold aged in Ag. injection Ag as _ Ar _ _.
    assert (Op : reads e <> [] -> ended u = false) by (intros Nx; destruct (ended u) eqn:En; [exfalso|reflexivity]; destruct (k_ended _ _ _ _ _ _ K En) as [_ Z]; specialize (Z (proj2 (never_full i H))); fold u in Z; destruct e; try contradiction; destruct He; contradiction).
    pose proof (begin_of_rises (c_window (cfg i) i) _ _ (the_first_round_is_no_later (cfg i) (ok_updates _ (configs_ok _ _ ok i H)) (coming u))) as Lo.
    destruct (what_is_held_stays_in_place (begin i) (cfg i) (cfg i) i (depth i) u e t NG E B1) as [B5 Ct].
    { intros x Ix. specialize (Op ltac:(intros Z; rewrite Z in Ix; exact Ix)). destruct B4 as [B4|[B3 B4]]; [congruence|]. destruct e as [xs en full| |y| | |cause|]; simpl in Ix; try contradiction.
      destruct He as [Wn [Lx _]]. destruct My as [Xs _]. fold u in Xs. rewrite Xs in Ix. apply (positions_of_a_part (input i) 0 (fun j z Ez => numbered i j z H Ez)) in Ix. lia. }
    split; [exact B5|]. rewrite Ct. destruct e as [xs en full| |y| | |cause|]; simpl in Ar; try (unfold held in He; injection He as _ -> -> _; rewrite Ar, Nat.add_0_r; exact B4).
    destruct He as [Wn [Lx He]]. unfold held in He. injection He as _ Hn Hd _. rewrite Hn, Hd, Ar. destruct en; [left; apply orb_true_r|rewrite orb_false_r].
    assert (Nf : full = false).
    { destruct full; [|reflexivity]. simpl in My. destruct My as [_ My]. exfalso. rewrite (proj1 (never_full i H)) in My. intuition discriminate. }
    subst full. cbn [orb]. destruct B4 as [En|B4]; [left; exact En|right; simpl in *; lia].
  - intros s i y t R H My E [B1 B4]. pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I i H) as K. set (u := rank_of s i) in *.
    pose proof (nothing_is_read_of_an_answer _ _ _ _ _ _ E) as Re. destruct (join i H) as [_ J2]. pose proof (ok_updates _ (configs_ok _ _ ok i H)) as Up.
    assert (Gr : forall a n, y = Agreed a -> at_phase u = OFFER -> makes_steps (cfg i) a n -> wanted u = 0 /\ groups u = form_groups (cfg i) u /\ length (groups u) <= n)
      by (intros a n ->; intros Pu; exact (all_groups_are_agreed_on W cfg depth input s i a ok (updating i H) I H My Pu n)).
    destruct (what_is_held_stays_in_place_with_an_answer (begin i) (cfg i) i (depth i) u y t (configs_ok _ _ ok i H) (begin_of_rises _) (fun k gs t d => surplus i k gs t d H) J2
      (k_aligned _ _ _ _ _ _ K) (k_plan _ _ _ _ _ _ K) (fun a n Ea Pu Ms => proj2 (Gr a n Ea Pu Ms)) E B1) as [B5 B6].
    split; [exact B5|]. simpl in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
    + assert (Cu : coming u = round u) by (unfold coming, in_count; rewrite Ph; lia). rewrite Cu in B4.
      destruct (held_agree _ _ _ _ _ _ E) as [[Pt He]|[Pt He]]; unfold held in He; [injection He as Hw Hn Hd Hr|injection He as Hn Hd Hr].
      * assert (Ct : coming t = round u) by (unfold coming; rewrite (not_in_count t Pt); lia). rewrite Ct, Hn, Hd, Re. exact B4.
      * destruct (agree_cases _ _ _ _ _ _ E) as [[_ Q2 _ _|? _ _ [Q2|Q2] _|_ _ _ _ [Q2|Q2] _|n B Sr Ra Tg _ _ _ _] _]; try congruence.
        destruct (Gr a n eq_refl eq_refl) as [Rw _]; [unfold makes_steps; auto|].
        assert (Wt : window t = []).
        { rewrite (B6 eq_refl Pt). destruct (has_steps (cfg i) (round u)) eqn:Hs; [reflexivity|]. exact (quiet_windows_are_empty i (round u) u H Hs Cu B1). }
        rewrite Wt in Hn. assert (Ct : coming t = S (round u)) by (unfold coming, in_count; rewrite Pt, Hr; lia).
        rewrite Ct, Hd, Hn, Re, (proj2 (never_full i H)). destruct (ended u) eqn:En; [left; reflexivity|right]. destruct B4 as [B4|[B4 _]]; [congruence|]. rewrite Rw in B4. simpl in *. lia.
    + destruct (count_cases _ _ _ _ _ E) as [_ [_ [_ [_ [Pt _]]]]]. pose proof (held_count _ _ _ _ _ E) as He. cbv zeta in He. unfold held in He. injection He as _ Hn Hd Hr.
      assert (Ct : coming t = coming u) by (unfold coming, in_count; rewrite Ph; destruct Pt as [-> | ->]; rewrite Hr; lia). rewrite Ct, Hn, Hd, Re. exact B4.
    + destruct (failure_of rs) as [o|]; [|discriminate]. injection E as <-.
      unfold coming in *. rewrite drained_is_not_in_count. unfold in_count in B4. rewrite Ph in B4. exact B4.
  - intros s i n la R H [Sh _] _. destruct (never_full i H). congruence.
Qed.

Theorem a_round_holds_only_samples_of_its_own_window : forall s r x y, reachable s -> r < W -> In x (steps_of (rank_of s r)) -> In y (s_group x) ->
  has_steps (cfg r) (s_round x) = true /\ begin_of (c_window (cfg r) r) (first_round (cfg r) (s_round x)) <= pos y < begin_of (c_window (cfg r) r) (S (s_round x)).
Proof. intros s r x y R H Ix Iy. destruct (p_steps _ _ _ (proj1 (everything_is_in_place s R r H)) x Ix) as [Hs P]. split; [exact Hs|exact (P y Iy)]. Qed.

(** A rank is past round [k] once it has begun a later one or is COMPLETE. *)
Definition is_past (k : nat) (u : state) : Prop := k < round u \/ (is_ending u = true /\ ended_as u = Some Complete).

Theorem a_rank_past_a_round_has_planned_each_sample_of_its_window_in_it : forall s r y k, reachable s -> r < W -> has_steps (cfg r) k = true ->
  is_past k (rank_of s r) -> In y (input r) -> begin_of (c_window (cfg r) r) (first_round (cfg r) k) <= pos y < begin_of (c_window (cfg r) r) (S k) ->
  exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = k.
Proof.
  intros s r y k R H Hk Pa Iy Py. destruct (everything_is_in_place s R r H) as [P Rd]. set (u := rank_of s r) in *. pose proof (ok_updates _ (configs_ok _ _ ok r H)) as Up.
  assert (Past : has_done (begin r) (input r) k u).
  { destruct Pa as [L|[En Co]].
    - left. split; [exact L|]. split; [exact (nothing_is_lost W cfg depth input s r (sound_of ok R) H)|]. destruct Rd as [E|[_ Rd]]; [left|right].
      + destruct (k_ended _ _ _ _ _ _ (g_core _ _ _ _ _ (invariant_of W cfg depth input ok s R) r H) E) as [Z Z0]. specialize (Z0 (proj2 (never_full r H))). fold u in Z, Z0. apply skipn_all2. lia.
      + pose proof (begin_of_rises (c_window (cfg r) r) (S k) (coming u) ltac:(unfold coming; lia)). lia.
    - right. destruct (join 0 (some_rank _ _ ok)) as [J1 J2]. exact (a_complete_rank_has_planned_its_whole_input W cfg depth input s r (sound_of ok R) H J1 J2 En Co). }
  assert (I : In y (samples_of (steps_in_round k u))).
  { apply (Permutation_in y (Permutation_sym (what_a_rank_past_a_round_holds_of_it (begin r) (cfg r) (input r) u k Up Hk (begin_of_rises _) (fun i x => numbered r i x H)
      (in_place_laid _ _ _ Up (begin_of_rises _) P) Past))).
    apply filter_In. split; [exact Iy|apply of_update_spec; exact Py]. }
  unfold samples_of, steps_in_round in I. apply in_concat in I as [g [Ig Iyg]]. apply in_map_iff in Ig as [x [<- Ix]]. apply filter_In in Ix as [Ix E]. apply Nat.eqb_eq in E. eauto.
Qed.

(** ** Shares: rank [r] reads the places r, r + W, r + 2 W and so on of the common order; update [u] has those from u n up to (u + 1) n *)

Variable n : nat.
Hypothesis shares : forall r, r < W -> c_updates (cfg r) = Some 2 /\ forall k, c_window (cfg r) r k = own_window W n r k.

Lemma first_rounds : forall r u, r < W -> first_round (cfg r) (last_round u) = 2 * u /\ has_steps (cfg r) (last_round u) = true.
Proof.
  intros r u H. destruct (shares r H) as [Up _]. unfold first_round, has_steps, update_rounds, last_round. rewrite Up. split.
  - replace (S (2 * u)) with (1 + u * 2) by lia. rewrite Nat.div_add by lia. simpl. lia.
  - replace (S (S (2 * u))) with (S u * 2) by lia. rewrite Nat.mod_mul by lia. reflexivity.
Qed.

Lemma rounds_with_steps : forall r k, r < W -> has_steps (cfg r) k = true -> exists u, k = last_round u.
Proof.
  intros r k H Hs. destruct (shares r H) as [Up _]. unfold has_steps, update_rounds in Hs. rewrite Up in Hs. apply Nat.eqb_eq in Hs.
  pose proof (Nat.div_mod (S k) 2 ltac:(lia)). exists (S k / 2 - 1). unfold last_round. lia.
Qed.

Lemma shares_follow_each_other : forall r u, r < W -> begin_of (c_window (cfg r) r) (2 * u) = places_before W n r u.
Proof.
  intros r u H. destruct (shares r H) as [_ Sh]. induction u as [|u IH]; [symmetry; apply Nat.div_small; simpl; lia|]. replace (2 * S u) with (S (S (2 * u))) by lia. cbn [begin_of].
  rewrite IH, !Sh. fold (last_round u). destruct (the_last_round_alone_reads W n r u) as [-> ->]. unfold share.
  assert (L : places_before W n r u <= places_before W n r (S u)) by (apply Nat.div_le_mono; simpl; lia). lia.
Qed.

Lemma a_place_is_of_its_update : forall r u i, r < W ->
  (begin_of (c_window (cfg r) r) (first_round (cfg r) (last_round u)) <= i < begin_of (c_window (cfg r) r) (S (last_round u)) <-> u * n <= r + W * i < S u * n).
Proof.
  intros r u i H. rewrite (proj1 (first_rounds r u H)). replace (S (last_round u)) with (2 * S u) by (unfold last_round; lia). rewrite !shares_follow_each_other by exact H.
  pose proof (a_place_is_before W n r u i H). pose proof (a_place_is_before W n r (S u) i H). lia.
Qed.

(** With losses too: a run without losses makes the same steps on the rank, and is past every round that the rank is past. *)
Lemma as_without_losses : forall s r, lossy_reachable W cfg depth input s -> r < W ->
  exists v, reachable v /\ steps_of (rank_of s r) = steps_of (rank_of v r) /\ forall k, is_past k (rank_of s r) -> is_past k (rank_of v r).
Proof.
  intros s r R H. destruct (a_run_with_losses_follows_a_run_without W cfg depth input ok s R) as [v [Rv F]]. exists v. split; [exact Rv|].
  destruct (follows_frame W s v r F H) as [E [_ [Er _]]]. split; [exact E|]. intros k [L|[En Co]]; [left; congruence|right].
  rewrite <- (live_is_followed W s v r F H (complete_is_not_lost _ Co)). auto.
Qed.

Theorem an_update_holds_only_samples_at_its_places : forall s r x y, lossy_reachable W cfg depth input s -> r < W ->
  In x (steps_of (rank_of s r)) -> In y (s_group x) -> exists u, s_round x = last_round u /\ u * n <= r + W * pos y < S u * n.
Proof.
  intros s r x y R H Ix Iy. destruct (as_without_losses s r R H) as [v [Rv [E _]]]. rewrite E in Ix.
  destruct (a_round_holds_only_samples_of_its_own_window v r x y Rv H Ix Iy) as [Hs B]. destruct (rounds_with_steps r _ H Hs) as [u L].
  exists u. split; [exact L|]. apply a_place_is_of_its_update; [exact H|]. rewrite <- L. exact B.
Qed.

Theorem each_sample_at_the_places_of_an_update_is_in_it : forall s r y u, lossy_reachable W cfg depth input s -> r < W ->
  is_past (last_round u) (rank_of s r) -> In y (input r) -> u * n <= r + W * pos y < S u * n ->
  exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = last_round u.
Proof.
  intros s r y u R H Pa Iy P. destruct (as_without_losses s r R H) as [v [Rv [-> Pv]]].
  apply a_rank_past_a_round_has_planned_each_sample_of_its_window_in_it; auto; [apply (first_rounds r u H)|apply a_place_is_of_its_update; assumption].
Qed.

(** The places of the common order that rank [r] trains on in update [u]. *)
Definition places_in (s : sys) (u r : nat) : list nat := flat_map (fun x => map (fun y => r + W * pos y) (s_group x)) (steps_in_round (last_round u) (rank_of s r)).

Lemma in_places : forall s u r p, In p (places_in s u r) <-> exists x y, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = last_round u /\ p = r + W * pos y.
Proof.
  intros s u r p. unfold places_in, steps_in_round. rewrite in_flat_map. setoid_rewrite filter_In. setoid_rewrite in_map_iff. setoid_rewrite Nat.eqb_eq.
  split; [intros [x [[Ix E] [y [<- Iy]]]]; exists x, y; auto|intros [x [y [Ix [Iy [E ->]]]]]; exists x; eauto].
Qed.

Lemma places_are_in_it_once : forall s u r, lossy_reachable W cfg depth input s -> r < W -> NoDup (places_in s u r).
Proof.
  intros s u r R H. apply NoDup_filtered. replace (flat_map _ _) with (map (fun p => r + W * p) (map pos (samples_of (steps_of (rank_of s r))))).
  2:{ unfold samples_of. rewrite map_map, concat_map, map_map, flat_map_concat_map. reflexivity. }
  apply FinFun.Injective_map_NoDup; [intros a b; nia|]. apply (with_losses_no_sample_is_emitted_twice W cfg depth input s r (on_its_way ok R) H).
  rewrite (map_numbered _ _ pos (fun i => i) (input r) (fun i x => numbered r i x H)), map_id. apply seq_NoDup.
Qed.

(** The number of places in the common order. *)
Variable total : nat.
Hypothesis whole_order : forall r i, r < W -> (i < length (input r) <-> r + W * i < total).

Theorem an_update_holds_exactly_what_lies_at_its_places : forall s u, lossy_reachable W cfg depth input s -> (forall r, r < W -> is_past (last_round u) (rank_of s r)) ->
  Permutation (concat (map (places_in s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n)).
Proof.
  intros s u R Pa. pose proof (some_rank _ _ ok) as W1.
  assert (Mod : forall r i, r < W -> (r + W * i) mod W = r) by (intros r i H; rewrite (Nat.mul_comm W), Nat.mod_add by lia; apply Nat.mod_small, H).
  apply NoDup_Permutation; [|apply seq_NoDup|].
  - apply (NoDup_by_key _ (fun p => p mod W)); [apply seq_NoDup|]. intros r Ir. apply in_seq in Ir. split; [apply places_are_in_it_once; [exact R|lia]|].
    intros p Ip. apply in_places in Ip as [x [y [_ [_ [_ ->]]]]]. apply Mod. lia.
  - intros p. rewrite in_concat, in_seq. split.
    + intros [l [Il Ip]]. apply in_map_iff in Il as [r [<- Ir]]. apply in_seq in Ir as [_ H]. simpl in H. apply in_places in Ip as [x [y [Ix [Iy [E ->]]]]].
      destruct (an_update_holds_only_samples_at_its_places s r x y R H Ix Iy) as [u' [E' B]]. assert (u' = u) by (rewrite E in E'; unfold last_round in E'; lia). subst u'.
      assert (In y (input r)).
      { apply (Permutation_in y (with_losses_no_sample_goes_missing W cfg depth input s r (on_its_way ok R) H)), in_or_app. left. apply in_concat. exists (s_group x). split; [apply in_map, Ix|exact Iy]. }
      apply In_nth_error in H0 as [i Ei]. pose proof (numbered r i y H Ei) as Pi. assert (Li : i < length (input r)) by (apply nth_error_Some; congruence). apply whole_order in Li; [|exact H]. rewrite Pi in *. lia.
    + intros Lp. pose proof (Nat.div_mod p W ltac:(lia)) as D. pose proof (Nat.mod_upper_bound p W ltac:(lia)) as H. set (r := p mod W) in *. set (i := p / W) in *.
      assert (Li : i < length (input r)) by (apply whole_order; [exact H|lia]). apply nth_error_Some in Li. destruct (nth_error (input r) i) as [y|] eqn:Ei; [|contradiction].
      pose proof (numbered r i y H Ei) as Pi. destruct (each_sample_at_the_places_of_an_update_is_in_it s r y u R H (Pa r H) (nth_error_In _ _ Ei) ltac:(rewrite Pi; lia)) as [x [Ix [Iy E]]].
      exists (places_in s u r). split; [apply in_map, in_seq; lia|]. apply in_places. exists x, y. repeat split; auto. rewrite Pi. lia.
Qed.

End Updates.

(** ** What ships *)

(** Any configuration, in updates: with the windows of a rank that has its own source, or for an order that is shared, which is drawn in
    [p - 1] portions and asks for no windows. *)
Definition in_updates (W n : nat) : config -> config := with_reading false (own_window W n) (Some 2).
Definition in_portions (p : nat) : config -> config := with_reading false (fun _ _ => 1) (Some p).

Lemma with_reading_meets_every_assumption : forall W windows p c, 1 <= W -> 1 <= p -> (forall r k, S k mod p = 0 -> 1 <= windows r k) -> config_ok c ->
  setting_ok W (fun _ => with_reading false windows (Some p) c).
Proof.
  intros W windows p c Hw Hp Wi K. constructor; [exact Hw| |reflexivity]. intros _ _. destruct K. constructor; auto.
  intros r k Hs. apply Wi, Nat.eqb_eq, Hs.
Qed.

(** So ranks that read this way meet all assumptions of ALIGN, CONSERVE, COVER, ONCE and TERM. *)
Theorem ranks_in_updates_meet_every_assumption : forall W n c, 1 <= W -> W <= n -> config_ok c -> setting_ok W (fun _ => in_updates W n c).
Proof.
  intros W n c Hw Hn. apply with_reading_meets_every_assumption; [exact Hw|lia|]. intros r k Hs. unfold own_window. rewrite Hs. apply each_rank_has_some_of_an_update; assumption.
Qed.

Theorem ranks_in_portions_meet_every_assumption : forall W p c, 1 <= W -> 1 <= p -> config_ok c -> setting_ok W (fun _ => in_portions p c).
Proof. intros W p c Hw Hp. apply with_reading_meets_every_assumption; auto. Qed.

(** Groups may be formed in any way that keeps exactly the window, which includes a limit on padding (R16.3). *)
Definition forms (form : option nat -> list sample -> list group) : Prop := forall b w, Permutation (concat (form b w)) w /\ Forall (fun g => g <> []) (form b w).

(** A configuration of updates in join mode: groups formed so, and aligned in any order by any gauge that is as is asked, under budgets that
    may change, with any rule, and read in some way. What ships is one, in either layout, with any cost, with friendly sizes or without. *)
Definition ships_updates (reading : config -> config) (cfg : nat -> config) : Prop := exists form o M max_age rule print first accepts keeps,
  forms form /\ gauge_ok M /\ 1 <= max_age /\ within_bounds rule /\
  cfg = fun _ => reading (mkConfig form (align_in o M) (fun _ _ => 1) false None max_age rule print first accepts (fun _ => false) false keeps None).

Theorem what_ships_is_a_configuration_of_updates : forall shares windows p l C whole padding_share limits first accepts size ramp max_age rule print o, cost_ok C -> 1 <= max_age -> within_bounds rule ->
  ships_updates (with_reading shares windows p) (fun _ => with_reading shares windows p (shipped l C whole padding_share limits first accepts size ramp max_age false None rule print o (fun _ => false))).
Proof.
  intros shares windows p l C whole padding_share limits first accepts size ramp max_age rule print o Co A Wb.
  pose proof (the_shipped_configuration_meets_every_assumption l C whole padding_share limits first accepts size ramp max_age false None rule print o (fun _ => false) Co A Wb) as K.
  do 9 eexists. split; [intros b w; split; [apply (ok_group_perm _ K)|apply (ok_group_nonempty _ K)]|]. split; [exact (every_layout_and_cost_measures_groups_as_is_asked l C Co)|].
  split; [exact A|]. split; [exact (ok_rule _ K)|reflexivity].
Qed.

Lemma what_ships_meets_every_assumption_of_updates : forall W windows p cfg, 1 <= W -> 1 <= p -> (forall r k, S k mod p = 0 -> 1 <= windows r k) ->
  ships_updates (with_reading false windows (Some p)) cfg -> setting_ok W cfg /\
  (forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) /\
  (forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = []) /\
  (forall r, r < W -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false) /\ (forall r, r < W -> c_updates (cfg r) = Some p /\ forall k, c_window (cfg r) r k = windows r k).
Proof.
  intros W windows p cfg Hw Hp Wi [form [o [M [max_age [rule [print [first [accepts [keeps [Fo [Co [Ha [Wb ->]]]]]]]]]]]]]. split; [|repeat split].
  - apply with_reading_meets_every_assumption; [exact Hw|exact Hp|exact Wi|].
    constructor; simpl; auto using in_every_order_an_alignment_has_the_target_number_of_steps,
      in_every_order_an_alignment_keeps_exactly_the_groups, in_every_order_no_step_is_left_idle; try apply Fo.
    intros k gs t d D. destruct (carried_in o M k gs t d) as [way ->]. apply nothing_due_is_carried_when_the_target_covers_the_due_groups, D.
  - intros q k gs t d _ L. simpl. destruct (carried_in o M k gs t d) as [way ->]. apply an_alignment_carries_only_surplus_groups, L.
Qed.

Lemma what_ships_with_a_source_of_ones_own_meets_every_assumption : forall W n cfg, 1 <= W -> W <= n -> ships_updates (in_updates W n) cfg -> setting_ok W cfg /\
  (forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) /\
  (forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = []) /\
  (forall r, r < W -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false) /\
  (forall r k, r < W -> has_steps (cfg r) k = false -> c_window (cfg r) r k = 0) /\ (forall r, r < W -> c_updates (cfg r) = Some 2 /\ forall k, c_window (cfg r) r k = own_window W n r k).
Proof.
  intros W n cfg Hw Hn Sp. destruct (what_ships_meets_every_assumption_of_updates W (own_window W n) 2 cfg Hw ltac:(lia)) as [Ok [Jm [Su [Nf Up]]]]; [|exact Sp|].
  - intros r k Hs. unfold own_window. rewrite Hs. apply each_rank_has_some_of_an_update; assumption.
  - repeat (split; [assumption|]). split; [|exact Up]. intros r k H Hs. destruct (Up r H) as [U Wi]. rewrite Wi. unfold own_window. unfold has_steps, update_rounds in Hs. rewrite U in Hs. rewrite Hs. reflexivity.
Qed.
