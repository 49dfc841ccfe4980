(** UPDATE: where a rule keeps no group of any rank back, a round holds exactly the samples of its window, on every rank; and
    windows that are the shares of an update make rounds that are updates. Spec: R16. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Rules Types Alignment Layouts Runs Machine Local Rank System Facts Keeps Protocol Age Ending Coupled Termination Rounds Instance Loss.
Import ListNotations.

(** Where the window of round [k] begins in a rank's input, when no window is full of bytes and nothing is carried. *)
Fixpoint begin_of (size : nat -> nat) (k : nat) : nat := match k with 0 => 0 | S j => begin_of size j + size j end.

Lemma begin_of_rises : forall size k j, k <= j -> begin_of size k <= begin_of size j.
Proof. intros size k j L. induction L; simpl; lia. Qed.

Lemma positions_of_a_part : forall (l : list sample) k, (forall i x, nth_error l i = Some x -> pos x = k + i) ->
  forall n m x, In x (firstn m (skipn n l)) -> k + n <= pos x < k + n + m.
Proof.
  induction l as [|a l IH]; intros k P n m x I; [rewrite skipn_nil, firstn_nil in I; easy|].
  assert (P' : forall i y, nth_error l i = Some y -> pos y = S k + i) by (intros i y E; rewrite (P (S i) y E); lia).
  destruct n as [|n]; simpl in I; [|specialize (IH _ P' n m x I); lia].
  destruct m as [|m]; simpl in I; [easy|]. destruct I as [<-|I]; [rewrite (P 0 a eq_refl); lia|]. specialize (IH _ P' 0 m x I). lia.
Qed.

Section Updates.
Variable W : nat.
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W cfg.
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
(** An alignment carries only what is surplus, and the rule leaves no surplus on any rank. *)
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].
Hypothesis emits_all : forall r a, r < W -> o_groups_max a <= c_rule (cfg r) a.
Hypothesis never_full : forall r, r < W -> c_bounded (cfg r) r = false.
Hypothesis numbered : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation reachable := (System.reachable W cfg depth input).
Notation hist_of := (System.hist_of cfg).
Notation begin r := (begin_of (c_window (cfg r))).

Definition within (a b : nat) (xs : list sample) : Prop := forall x, In x xs -> a <= pos x < b.
Definition is_going (u : state) : Prop := at_phase u = FILL \/ at_phase u = OFFER \/ at_phase u = COUNT.
(** The round whose window a rank holds: in COUNT the next one's. *)
Definition coming (u : state) : nat := round u + in_count u.

Record in_place (r : nat) (u : state) : Prop := {
  p_steps : forall x, In x (steps_of u) -> within (begin r (s_round x)) (begin r (S (s_round x))) (s_group x);
  p_aligned : within (begin r (round u)) (begin r (S (round u))) (concat (aligned u));
  p_window : is_going u -> within (begin r (coming u)) (begin r (S (coming u))) (window u);
  p_read : is_going u -> ended u = true \/ (read u + wanted u = begin r (S (coming u)) /\ begin r (coming u) <= read u) }.

Lemma everything_is_in_place : forall s, reachable s -> forall r, r < W -> in_place r (rank_of s r).
Proof.
  induction 1 as [|s l t R IH St]; intros r H.
  { constructor; unfold coming, in_count; simpl; try (intros; easy). intros _. right. lia. }
  pose proof (invariant_of W cfg depth input ok s R) as I.
  destruct St as [s i e t Hi My E|s x P Rd|s i Hi Ru Tk]; [|exact (IH r H)|exact (IH r H)].
  simpl. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact (IH r H)].
  specialize (IH i H). pose proof (g_core _ _ _ _ _ I i H) as K. pose proof (rank_step_after W cfg depth input ok s i e t I H My E) as K'.
  pose proof (may_admissible W cfg depth input (some_rank _ _ ok) (prints_differ _ _ ok) s i _ I H My) as Ad.
  set (u := rank_of s i) in *. destruct IH as [B1 B2 B3 B4].
  pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
  - pose proof (nothing_is_read_of_an_answer _ _ _ _ _ _ E) as Re. simpl in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
    + destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]]. pose proof (held_agree _ _ _ _ _ _ E) as He.
      assert (Au : aligned u = []) by (apply (k_aligned _ _ _ _ _ _ K); fold u; rewrite Ph; discriminate).
      assert (Cu : coming u = round u) by (unfold coming, in_count; rewrite Ph; lia).
      assert (Gu : is_going u) by (unfold is_going; auto). specialize (B3 Gu). specialize (B4 Gu). rewrite Cu in *.
      destruct He as [[Pt He]|[Pt He]]; unfold held in He; [|injection He as Hn Hd Hr].
      { destruct (S2 Pt) as [Sa _]. assert (Ng : ~ is_going t).
        { destruct C as [_ P2 _ _|? _ _ P2 _|_ _ _ _ P2 _|n _ _ _ _ P2 _ _ _]; unfold is_going; try (destruct P2 as [P2|P2]); try congruence; rewrite P2; intros [X|[X|X]]; discriminate. }
        constructor; try (intros; contradiction); rewrite ?S1, ?Sa, ?Au; [exact B1|simpl; intros x []]. }
      destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
      destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po O]]. destruct (of_ready _ _ _ _ O (proj2 Ad Ra o Po)) as [_ [Rw [R3 [_ [Rg _]]]]].
      destruct (got_current W cfg depth input s i (Agreed a) I H My) as [_ [_ [_ [ms [El Em]]]]].
      pose proof (log_entry W cfg depth input s _ _ I El) as [_ [ER _]]. simpl in ER.
      destruct (reduce_agreed _ _ ER) as [os [-> A]]. unfold message in Em. fold u in Em. rewrite Po in Em. apply nth_error_In in Em. apply in_map_iff in Em as [o' [Eo Io]]. injection Eo as ->.
      assert (Enough : length (groups u) <= S n).
      { pose proof (ag_groups _ _ A o Io) as G. rewrite Rg in G. pose proof (emits_all i a H) as G2.
        unfold target in Tg. destruct (join i H) as [J _]. rewrite J in Tg. simpl in Tg. destruct (_ || _) in Tg; [discriminate|lia]. }
      pose proof (surplus i (round u) (groups u) (S n) (due_before (cfg i) u) H Enough) as Sn.
      pose proof (ok_align_perm _ (configs_ok _ _ ok i H) (round u) (groups u) (S n) (due_before (cfg i) u)) as Pm. rewrite Sn, app_nil_r, <- Al in Pm.
      pose proof (ok_group_perm _ (configs_ok _ _ ok i H) (budget u) (window u)) as Gp. rewrite <- R3 in Gp.
      assert (Wt : window t = []) by (rewrite Ca; exact Sn). rewrite Wt in Hn. simpl in Hn.
      assert (Ct : coming t = S (round u)) by (unfold coming, in_count; rewrite Pt, Hr; lia).
      constructor; rewrite ?S1, ?Ct, ?Hr.
      * exact B1.
      * intros x Ix. apply B3. apply (Permutation_in _ Gp), (Permutation_in _ Pm), Ix.
      * intros _. rewrite Wt. intros x [].
      * intros _. rewrite Hd, Hn, Re. destruct (ended u) eqn:En; [left; reflexivity|right]. destruct B4 as [B4|[B4 B5]]; [congruence|]. rewrite Rw in B4. simpl in *. lia.
    + destruct (count_cases _ _ _ _ _ E) as [Lc [Al [_ [_ [Pt _]]]]]. destruct (count_rounds _ _ _ _ _ E (k_plan _ _ _ _ _ _ K Ph)) as [new [S2 [S3 Rn]]].
      pose proof (held_count _ _ _ _ _ E) as He. destruct (join i H) as [_ J2].
      assert (Cut : cut (cfg i) (gsum u) cs = length cs) by (unfold cut; rewrite J2; reflexivity). cbv zeta in He. rewrite Cut in S3, He. rewrite Lc in S3, He. rewrite firstn_all in S3. rewrite skipn_all in He.
      simpl in He. unfold held in He. injection He as Hw Hn Hd Hr.
      assert (Cu : coming u = S (round u)) by (unfold coming, in_count; rewrite Ph; lia).
      assert (Ct : coming t = S (round u)) by (unfold coming, in_count; destruct Pt as [-> | ->]; rewrite Hr; lia).
      assert (Gu : is_going u) by (unfold is_going; auto). specialize (B3 Gu). specialize (B4 Gu). rewrite Cu in *.
      constructor; rewrite ?Ct.
      * intros x Ix. rewrite S2 in Ix. apply in_app_iff in Ix as [Ix|Ix]; [exact (B1 x Ix)|].
        assert (Rx : s_round x = round u) by (rewrite Forall_forall in Rn; exact (Rn x Ix)).
        rewrite Rx. intros y Iy. apply B2. apply in_concat. exists (s_group x). split; [|exact Iy]. rewrite <- S3. apply in_map, Ix.
      * rewrite Al. intros x [].
      * intros _. rewrite Hw. exact B3.
      * intros _. rewrite Hn, Hd, Re. exact B4.
    + destruct (failure_of rs) as [o|]; [|discriminate]. injection E as <-.
      match goal with |- in_place _ (drain ?d ?o ?l ?v) => assert (Ng : ~ is_going (drain d o l v)) by (unfold is_going; destruct (drain_phase d o l v) as [-> | ->]; intros [X|[X|X]]; discriminate) end.
      constructor; try (intros; contradiction); rewrite ?drain_steps; [exact B1|].
      simpl. fold u in K. rewrite (k_aligned _ _ _ _ _ _ K) by (rewrite Ph; discriminate). intros x [].
  - pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. pose proof (held_transition _ _ _ _ _ _ NG E) as He.
    pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. fold u in Sm, He, Ag. unfold aged in Ag. injection Ag as _ Ar Aw Ao.
    replace (next_hist (cfg 0) (hist_of s i) e) with (hist_of s i) in * by (destruct e; try reflexivity; exfalso; eapply NG; reflexivity).
    assert (Ph : in_count t = in_count u /\ (is_going t -> is_going u)).
    { pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K)) as P1. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K')) as P2. fold u in P1. unfold in_count, is_going.
      destruct (h_kind (hist_of s i)); [destruct P1 as [-> | ->], P2 as [-> | ->]|rewrite P1, P2|rewrite P1, P2|destruct P1 as [-> | ->], P2 as [-> | ->]]; split; auto; intros [X|[X|X]]; discriminate. }
    destruct Ph as [Ic Gt]. assert (Ct : coming t = coming u) by (unfold coming; rewrite Ic, Ao; reflexivity).
    constructor; rewrite ?(sa_steps _ _ Sm), ?(sa_aligned _ _ Sm), ?Ao, ?Ct; [exact B1|exact B2| |]; intros G; specialize (B3 (Gt G)); specialize (B4 (Gt G)).
    + rewrite Aw. intros x Ix. apply in_app_iff in Ix as [Ix|Ix]; [exact (B3 x Ix)|]. destruct e as [xs en full| |x'| | |cause|]; simpl in Ix; try contradiction.
      destruct He as [Wn [Lx _]]. destruct Ad as [Xs _]. fold u in Xs. rewrite Xs in Ix.
      apply (positions_of_a_part (input i) 0 (fun j z Ez => numbered i j z H Ez)) in Ix. destruct B4 as [En|[B4 B5]]; [|lia].
      destruct (k_ended _ _ _ _ _ _ K En) as [_ Z]. fold u in Z. contradiction.
    + destruct e as [xs en full| |x'| | |cause|]; simpl in Ar; try (unfold held in He; injection He as _ -> -> _; rewrite Ar, Nat.add_0_r; exact B4).
      destruct He as [Wn [Lx He]]. unfold held in He. injection He as _ Hn Hd _. rewrite Hn, Hd, Ar. destruct en; [left; reflexivity|right].
      assert (Nf : full = false).
      { destruct full; [|reflexivity]. simpl in My. destruct My as [_ My]. exfalso. rewrite (never_full i H) in My. intuition discriminate. }
      subst full. cbn [orb]. destruct B4 as [En|B4]; [|lia]. destruct (k_ended _ _ _ _ _ _ K En) as [_ Z]. fold u in Z. contradiction.
Qed.

(** UPDATE: nothing is carried: a step of round [k] holds samples of the window of round [k] only, on every rank. *)
Theorem a_round_holds_only_samples_of_its_own_window : forall s r x y, reachable s -> r < W ->
  In x (steps_of (rank_of s r)) -> In y (s_group x) -> begin_of (c_window (cfg r)) (s_round x) <= pos y < begin_of (c_window (cfg r)) (S (s_round x)).
Proof. intros s r x y R H Ix Iy. exact (p_steps _ _ (everything_is_in_place s R r H) x Ix y Iy). Qed.

(** UPDATE, COVER: and where a rank is COMPLETE, all of them, each exactly once: in the round of its window. *)
Theorem a_complete_rank_has_planned_each_sample_in_the_round_of_its_window : forall s r y k, reachable s -> r < W ->
  is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete -> In y (input r) ->
  begin_of (c_window (cfg r)) k <= pos y < begin_of (c_window (cfg r)) (S k) ->
  exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = k.
Proof.
  intros s r y k R H En Co Iy Py. destruct (join 0 (Nat.le_lt_trans _ _ _ (Nat.le_0_l r) H)) as [J1 J2].
  pose proof (a_complete_rank_has_planned_its_whole_input W cfg depth input ok s r R H J1 J2 En Co) as Pl.
  assert (Is : In y (samples_of (steps_of (rank_of s r)))) by (apply (Permutation_in y (Permutation_sym Pl)), Iy).
  unfold samples_of in Is. apply in_concat in Is as [g [Ig Iyg]]. apply in_map_iff in Ig as [x [<- Ix]]. exists x. split; [exact Ix|]. split; [exact Iyg|].
  pose proof (a_round_holds_only_samples_of_its_own_window s r x y R H Ix Iyg) as Px.
  destruct (lt_eq_lt_dec (s_round x) k) as [[L|E]|L]; [|exact E|].
  - pose proof (begin_of_rises (c_window (cfg r)) (S (s_round x)) k L). lia.
  - pose proof (begin_of_rises (c_window (cfg r)) (S k) (s_round x) L). lia.
Qed.

(** ** Shares: rank [r] reads the places r, r + W, r + 2 W and so on of the common order, [n] of them for each update *)

Variable n : nat.
Hypothesis shares : forall r k, r < W -> c_window (cfg r) k = n.

Lemma shares_follow_each_other : forall r k, r < W -> begin_of (c_window (cfg r)) k = k * n.
Proof. intros r k H. induction k as [|k IH]; simpl; [reflexivity|]. rewrite IH, (shares r k H). lia. Qed.

Lemma a_place_is_of_its_update : forall r u i, r < W -> (u * n <= i < S u * n <-> u * (W * n) <= r + W * i < S u * (W * n)).
Proof. intros r u i H. split; intros [A B]; split; nia. Qed.

(** UPDATE: a step of round [u] holds only samples at the places from u W n up to (u + 1) W n of the common order. *)
Theorem an_update_holds_only_samples_at_its_places : forall s r x y, reachable s -> r < W ->
  In x (steps_of (rank_of s r)) -> In y (s_group x) -> s_round x * (W * n) <= r + W * pos y < S (s_round x) * (W * n).
Proof.
  intros s r x y R H Ix Iy. apply a_place_is_of_its_update; [exact H|]. rewrite <- !(shares_follow_each_other r) by exact H.
  exact (a_round_holds_only_samples_of_its_own_window s r x y R H Ix Iy).
Qed.

(** UPDATE: with losses too, whatever ranks are told, at any moment. *)
Theorem with_losses_an_update_holds_only_samples_at_its_places : forall u r x y, lossy_reachable W cfg depth input u -> r < W ->
  In x (steps_of (rank_of u r)) -> In y (s_group x) -> s_round x * (W * n) <= r + W * pos y < S (s_round x) * (W * n).
Proof.
  intros u r x y Ru H Ix Iy. destruct (a_run_with_losses_follows_a_run_without W cfg depth input ok u Ru) as [v [R F]].
  destruct (follows_frame W u v r F H) as [E _]. rewrite E in Ix. exact (an_update_holds_only_samples_at_its_places v r x y R H Ix Iy).
Qed.

(** UPDATE, COVER: and once its rank is COMPLETE, each sample at these places is in a step of round [u], on the rank whose place it is. *)
Theorem each_sample_at_the_places_of_an_update_is_in_it : forall s r y u, reachable s -> r < W ->
  is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete -> In y (input r) ->
  u * (W * n) <= r + W * pos y < S u * (W * n) -> exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = u.
Proof.
  intros s r y u R H En Co Iy P. apply a_complete_rank_has_planned_each_sample_in_the_round_of_its_window; auto.
  rewrite !(shares_follow_each_other r) by exact H. apply (a_place_is_of_its_update r u (pos y) H), P.
Qed.

End Updates.

(** ** What ships *)

(** As many steps as any rank has groups, or so many times as many where there are samples for them (R16.3). *)
Definition update_rule (times : nat) (a : offer) : nat := Nat.max (o_groups_max a) (Nat.min (times * o_groups_max a) (o_samples_max a)).

Theorem the_rules_of_updates_lie_within_the_bounds : forall times, within_bounds (update_rule times).
Proof. intros times a [S G D M]. unfold update_rule. lia. Qed.

(** UPDATE: the shipped machine, in either layout and any order, by any cost, under budgets that change as they may, on any number of ranks,
    with losses and without: an update holds nothing but what lies at its places; and of what a COMPLETE rank has there, all. *)
Theorem the_shipped_machine_trains_on_updates : forall W l C whole limits first accepts n max_age times print o depth input,
  1 <= W -> 1 <= n -> cost_ok C -> 1 <= max_age -> (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) ->
  let cfg := fun _ : nat => shipped l C whole limits first accepts n 0 max_age false None (update_rule times) print o (fun _ => false) in
  (forall s r x y, lossy_reachable W cfg depth input s -> r < W -> In x (steps_of (rank_of s r)) -> In y (s_group x) ->
    s_round x * (W * n) <= r + W * pos y < S (s_round x) * (W * n)) /\
  (forall s r y u, System.reachable W cfg depth input s -> r < W -> is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete ->
    In y (input r) -> u * (W * n) <= r + W * pos y < S u * (W * n) -> exists x, In x (steps_of (rank_of s r)) /\ In y (s_group x) /\ s_round x = u).
Proof.
  intros W l C whole limits first accepts n max_age times print o depth input Hw Hn Co Ha Nu cfg.
  assert (Ok : setting_ok W cfg).
  { constructor; [exact Hw| |reflexivity]. intros q _. apply the_shipped_configuration_meets_every_assumption; [exact Co|exact Ha|apply the_rules_of_updates_lie_within_the_bounds]. }
  assert (Jm : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) by (intros; split; reflexivity).
  assert (Su : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = []).
  { intros q k gs t d _ L. simpl. destruct (carried_in o (gauge_of l C) k gs t d) as [way ->]. apply an_alignment_carries_only_surplus_groups, L. }
  assert (Em : forall r a, r < W -> o_groups_max a <= c_rule (cfg r) a) by (intros q a _; simpl; unfold ramped, update_rule; destruct (o_groups_min a); simpl; lia).
  assert (Sh : forall r k, r < W -> c_window (cfg r) k = n).
  { intros q k _. change (window_samples n 0 k = n). unfold window_samples. rewrite Nat.sub_0_l, Nat.pow_0_r, Nat.div_1_r. lia. }
  assert (Nf : forall r, r < W -> c_bounded (cfg r) r = false) by (intros; reflexivity).
  split; [exact (with_losses_an_update_holds_only_samples_at_its_places W cfg depth input Ok Jm Su Em Nf Nu n Sh)|].
  exact (each_sample_at_the_places_of_an_update_is_in_it W cfg depth input Ok Jm Su Em Nf Nu n Sh).
Qed.
