(** AGE: a sample that is held in round [k] is planned in round [k + A] at the latest. In quota mode this holds unless round [k + A], or
    one before it, is the last that makes steps. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol.
Import ListNotations.

Lemma last_n_hd : forall (l : list nat) n, 1 <= n -> n <= length l -> hd 0 (last_n n l) = nth (length l - n) l 0.
Proof.
  assert (X : forall (l : list nat) k, k < length l -> hd 0 (skipn k l) = nth k l 0).
  { induction l as [|x l IH]; intros k K; simpl in K; [lia|]. destruct k; [reflexivity|]. simpl. apply IH. lia. }
  intros l n H L. apply X. lia.
Qed.

Lemma last_n_length : forall (A : Type) (l : list A) n, length (last_n n l) = Nat.min n (length l).
Proof. intros. unfold last_n. rewrite skipn_length. lia. Qed.

Lemma last_n_snoc : forall (A : Type) (l : list A) n x, 1 <= n -> last_n n (last_n n l ++ [x]) = last_n n (l ++ [x]).
Proof.
  intros A l n x H. unfold last_n. rewrite !app_length, skipn_length. simpl length. destruct (le_lt_dec n (length l)) as [L|L].
  - replace (length l - (length l - n) + 1 - n) with 1 by lia. replace (length l + 1 - n) with (S (length l - n)) by lia.
    assert (E : skipn (length l - n) (l ++ [x]) = skipn (length l - n) l ++ [x]).
    { rewrite skipn_app. replace (length l - n - length l) with 0 by lia. reflexivity. }
    rewrite <- (Nat.add_1_r (length l - n)), skipn_more, E. reflexivity.
  - replace (length l - n) with 0 by lia. simpl skipn at 2. rewrite Nat.sub_0_r. reflexivity.
Qed.

(** The fields that reading and marking change. *)
Definition aged (s : state) : list nat * nat * list sample * nat := (marks s, read s, window s, round s).

Definition reads (e : event) : list sample := match e with SamplesRead xs _ _ => xs | _ => [] end.

Lemma aged_transition : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t ->
  aged t = (marks s, read s + length (reads e), window s ++ reads e, round s).
Proof.
  intros c r d s e t NG E. destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> D]]; destruct e; try discriminate; try reflexivity; unfold reads; simpl length; rewrite Nat.add_0_r, app_nil_r; reflexivity.
Qed.

Lemma nothing_is_read_of_an_answer : forall c r d s y t, transition c r d s (Got y) = Some t -> read t = read s.
Proof. intros c r d s y t E. apply (answer_keeps _ _ _ _ _ _ E). Qed.

Lemma read_grows : forall c r d s e t, transition c r d s e = Some t -> read s <= read t.
Proof.
  intros c r d s e t E. pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
  - rewrite (nothing_is_read_of_an_answer _ _ _ _ _ _ E). reflexivity.
  - pose proof (aged_transition _ _ _ _ _ _ NG E) as A. unfold aged in A. injection A as _ A _ _. lia.
Qed.

(** The window and the state of its reading. *)
Definition held (s : state) : list sample * nat * bool * nat := (window s, wanted s, ended s, round s).

Lemma held_transition : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t ->
  match e with
  | SamplesRead xs en full =>
      wanted s <> 0 /\ length xs <= wanted s /\ held t = (window s ++ xs, if en || full then 0 else wanted s - length xs, ended s || en, round s)
  | _ => held t = held s
  end.
Proof.
  intros c r d s e t NG E. destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> D]]; destruct e; try discriminate; try reflexivity. destruct G as [G1 [G2 _]]. auto.
Qed.

(** What an agreement asks the rank to read. *)
Lemma held_agree : forall c r d a s t, agree c r d a s = Some t ->
  (at_phase t <> COUNT /\ held t = held s) \/
  (at_phase t = COUNT /\ held t = (window t, if ended s || c_shares c then 0 else c_window c r (S (round s)) - length (window t), ended s, round s)).
Proof.
  intros c r d a s t E. each_agreement E B Sr Ra Tg Ea; [left; split; [discriminate|reflexivity]|left; split; [drains|reflexivity]..|].
  right. split; [reflexivity|]. unfold held. simpl. reflexivity.
Qed.

Lemma held_count : forall c r cs s t, count c r cs s = Some t ->
  let n := cut c (gsum s) cs in
  held t = ((if is_nil (concat (skipn n (aligned s))) then window s else by_position (window s ++ concat (skipn n (aligned s)))), wanted s, ended s, S (round s)).
Proof. intros c r cs s t E n. destruct (count_eq _ _ _ _ _ E) as [_ ->]. reflexivity. Qed.

(** The source has ended and has been read to its end. *)
Definition has_read_all (s : state) : Prop := ended s = true /\ wanted s = 0.

Lemma all_stays_read : forall c r d s e t, transition c r d s e = Some t -> has_read_all s -> has_read_all t.
Proof.
  intros c r d s e t E [En Wa]. pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
  - simpl in E. destruct y as [a|cs|rs]; destruct (at_phase s); try discriminate.
    + destruct (held_agree _ _ _ _ _ _ E) as [[_ A]|[_ A]]; unfold held in A; [injection A as A1 A2 A3 A4|injection A as A2 A3 A4; rewrite En in A2]; split; simpl in *; congruence.
    + pose proof (held_count _ _ _ _ _ E) as A. unfold held in A. injection A as A1 A2 A3 A4. split; congruence.
    + destruct (failure_of rs); [|discriminate]. injection E as <-. split; assumption.
  - pose proof (held_transition _ _ _ _ _ _ NG E) as A. destruct e; try (unfold held in A; injection A as A1 A2 A3 A4; split; congruence). destruct A as [A _]. contradiction.
Qed.

(** A round that is cut short has reached the quota. *)
Lemma cut_at_reaches : forall q cs g, cut_at q g cs < length cs -> q <= g + total_samples (firstn (cut_at q g cs) cs).
Proof.
  induction cs as [|x cs IH]; simpl; intros g L; [lia|]. destruct (q <=? g + n_samples x) eqn:E.
  - apply Nat.leb_le in E. unfold total_samples. simpl. lia.
  - simpl. unfold total_samples in *. simpl. specialize (IH (g + n_samples x) ltac:(lia)). lia.
Qed.

Lemma cut_reaches : forall c g cs, cut c g cs < length cs -> is_quota_met c (g + total_samples (firstn (cut c g cs) cs)) = true.
Proof. intros c g cs. unfold cut, is_quota_met. destruct (c_quota c) as [q|]; [|lia]. intros L. apply Nat.leb_le, cut_at_reaches, L. Qed.

Lemma agreed_goes_on : forall c h a, h_kind h = NOffer -> h_kind (h_step c h (Agreed a)) <> NOffer.
Proof.
  intros c h a K. unfold h_step. rewrite K. destruct (is_bad a); [discriminate|]. destruct (o_stop_rank a); [discriminate|]. simpl. destruct (target c a); discriminate.
Qed.

Section Age.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
(** Every round forms steps. *)
Hypothesis plain : forall r, r < W -> c_updates (cfg r) = None.
(** In quota mode windows are not bounded in bytes, have one size on all ranks and do not shrink (R2.3), and no order is shared.
    Positions count a rank's input from 0. *)
Hypothesis growing : forall r, r < W -> c_is_quota (cfg r) = true -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false /\ forall p k j, k <= j -> c_window (cfg r) p k <= c_window (cfg r) r j.
Hypothesis placed : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation reachable := (System.reachable W cfg depth input).
Notation step := (System.step W cfg depth input).
Notation leads := (System.leads W cfg depth input).
Notation hist_of := (System.hist_of cfg).
Notation whole := (Facts.whole cfg).
Notation quota_met := (Facts.quota_met cfg).

Lemma every_round : forall r, r < W -> (forall k, has_steps (cfg r) k = true) /\
  (forall u, form_groups (cfg r) u = c_group (cfg r) (budget u) (window u)) /\ (forall u n, form_steps (cfg r) u n = c_align (cfg r) (round u) (groups u) n (due_before (cfg r) u)) /\
  (forall a, count_steps (cfg r) a = if c_is_quota (cfg r) then Nat.min (c_rule (cfg r) a) (o_samples_min a) else c_rule (cfg r) a).
Proof. intros r H. apply without_updates, plain, H. Qed.

(** An agreement that is good, holds no stop and leaves samples to plan is sane. *)
Definition sane_entry (p : list msg * result) : Prop :=
  match snd p with Agreed a => is_bad a = false -> o_stop_rank a = None -> o_samples_max a <> 0 -> sane a | _ => True end.

Lemma logged_agreements_are_sane : forall s, reachable s -> Forall sane_entry (log s).
Proof.
  induction 1 as [|s l t R IH St]; [constructor|]. pose proof (invariant_of W cfg depth input ok s R) as I.
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; simpl; try exact IH. apply Forall_app. split; [exact IH|]. constructor; [|constructor].
  unfold sane_entry. simpl. destruct x as [a| |]; auto. intros B Sr NZ.
  destruct (good_agreement_facts W cfg depth input ok s a I P Rd B Sr) as [_ [G _]]. apply (G NZ), (every_round 0 (some_rank _ _ ok)).
Qed.

(** All marks of every rank: the number of samples it had read when the window of each round was agreed on. *)
Definition remark (s : sys) (l : label) (t : sys) (m : nat -> list nat) : nat -> list nat :=
  match l with
  | LRank r (Got (Agreed _)) =>
      match at_phase (rank_of t r) with COUNT => update m r (m r ++ [read (rank_of s r)]) | _ => m end
  | _ => m
  end.

Inductive marked : sys -> (nat -> list nat) -> Prop :=
| marked_start : marked (start cfg) (fun _ => [])
| marked_step : forall s l t m, marked s m -> step s l t -> marked t (remark s l t m).

Theorem every_reachable_state_is_marked : forall s, reachable s -> exists m, marked s m.
Proof. induction 1 as [|s l t R [m M] St]; [eexists; constructor|]. eexists. eapply marked_step; eauto. Qed.

Lemma marked_reachable : forall s m, marked s m -> reachable s.
Proof. induction 1; [constructor|eapply reach_step; eauto]. Qed.

(** ** Windows are full while there is something to read *)

Record full (c : config) (r : nat) (met : bool) (s : state) : Prop := {
  u_cap : c_is_quota c = true -> met = true \/ length (window s) + wanted s <= c_window c r (round s + in_count s);
  u_full : c_is_quota c = true -> ended s = false -> c_window c r (round s + in_count s) <= length (window s) + wanted s }.

Lemma reachable_full : forall s, reachable s -> forall r, r < W -> full (cfg r) r (quota_met (hist_of s r)) (rank_of s r).
Proof.
  apply (each_rank_always W cfg depth input ok (fun r rs u => full (cfg r) r (quota_met (history (cfg 0) rs)) u)).
  - intros r H. constructor; rewrite initial_in_count; simpl; auto.
  - intros s i e t R H M NG E [U1 U2]. pose proof (own_event_keeps_in_count _ _ _ _ _ _ NG E) as Z. pose proof (held_transition _ _ _ _ _ _ NG E) as A. set (u := rank_of s i) in *.
    destruct e as [xs en full| | | | | |]; try (unfold held in A; injection A as A1 A2 A3 A4; constructor; rewrite Z, A1, A2, A4; [exact U1|rewrite A3; exact U2]).
    destruct A as [W1 [W2 A]]. unfold held in A. injection A as A1 A2 A3 A4.
    constructor; rewrite Z, A1, A2, A4, app_length.
    + intros Qm. destruct (U1 Qm) as [U|U]; [auto|right]. destruct (en || full); lia.
    + intros Qm Et. rewrite A3 in Et. apply orb_false_iff in Et as [En Et]. specialize (U2 Qm En). destruct M as [_ [_ [_ M]]].
      assert (Nf : full = false) by (destruct full; [|reflexivity]; destruct (M eq_refl) as [B _]; destruct (growing i H Qm); congruence).
      rewrite Et, Nf. simpl. lia.
  - intros s i y t R H M E IH. pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I i H) as K. set (u := rank_of s i) in *.
    rewrite history_snoc. change (history (cfg 0) (seen s i)) with (hist_of s i) in *. simpl in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
    + assert (Q : quota_met (h_step (cfg 0) (hist_of s i) (Agreed a)) = quota_met (hist_of s i)) by (unfold Facts.quota_met, h_samples; rewrite only_sums_add_steps by discriminate; reflexivity). rewrite Q.
      destruct IH as [U1 U2]. unfold in_count in U1, U2. rewrite Ph, Nat.add_0_r in U1, U2. destruct (held_agree _ _ _ _ _ _ E) as [[Pt A]|[Pt A]]; unfold held in A; [injection A as A1 A2 A3 A4|injection A as A2 A3 A4].
      * pose proof (not_in_count t Pt) as Z. constructor; rewrite Z, A1, A2, A4, Nat.add_0_r; [exact U1|rewrite A3; exact U2].
      * assert (Z : in_count t = 1) by (unfold in_count; rewrite Pt; reflexivity).
        assert (Lw : length (window t) <= length (window u)).
        { destruct (agree_cases _ _ _ _ _ _ E) as [C _]. destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
          destruct (answered_offer W cfg depth input s i a I H M Ph) as [o [os [A [Io [_ O]]]]]. fold u in O.
          destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [_ [R3 _]]].
          pose proof (Permutation_length (formed_perm _ (configs_ok _ _ ok i H) u n R3)) as Pl. rewrite app_length, <- Ca in Pl. lia. }
        constructor; rewrite Z, A4; replace (round u + 1) with (S (round u)) by lia.
        -- intros Qm. specialize (U1 Qm). destruct U1 as [U1|U1]; [auto|right]. pose proof (proj2 (proj2 (growing i H Qm)) i _ _ (Nat.le_succ_diag_r (round u))). rewrite A2. destruct (ended u || c_shares (cfg i)); lia.
        -- intros Qm En. rewrite A3 in En. rewrite A2, En, (proj1 (proj2 (growing i H Qm))). simpl. lia.
    + pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. destruct Kk as [Kk Kc]. pose proof (k_gsum _ _ _ _ _ _ K) as Kg. fold u in Kg.
      pose proof (held_count _ _ _ _ _ E) as A. simpl in A. unfold held in A. injection A as A1 A2 A3 A4. destruct (count_cases _ _ _ _ _ E) as [Lc [_ [_ [_ [Pt _]]]]].
      assert (Z : in_count t = 0) by (unfold in_count; destruct Pt as [-> | ->]; reflexivity). destruct IH as [U1 U2]. unfold in_count in U1, U2. rewrite Ph in U1, U2.
      replace (round u + 1) with (S (round u)) in U1, U2 by lia. set (n := cut (cfg i) (gsum u) cs) in *.
      constructor; rewrite Z, A2, A4, Nat.add_0_r, A1.
      * intros Qm. destruct (skipn n (aligned u)) as [|g gs] eqn:Sk.
        -- simpl. destruct (U1 Qm) as [U|U]; [left|right; exact U]. unfold Facts.quota_met, is_quota_met, h_samples, h_step in *. rewrite Kk. simpl. destruct (c_quota (cfg 0)); [|discriminate].
           apply Nat.leb_le in U. apply Nat.leb_le. rewrite sum_over_app. lia.
        -- left. assert (Ln : n < length cs) by (assert (L : length (skipn n (aligned u)) = S (length gs)) by (rewrite Sk; reflexivity); rewrite skipn_length in L; lia).
           pose proof (cut_reaches _ _ _ Ln) as Cr. unfold Facts.quota_met, h_samples, h_step. rewrite Kk. simpl. rewrite sum_over_app, make_shared_samples.
           rewrite Kg, Kc in Cr. unfold total_samples in Cr. exact Cr.
      * intros Qm En. rewrite A3 in En. specialize (U2 Qm En). destruct (is_nil _); [exact U2|]. unfold by_position. rewrite sort_by_length, app_length. lia.
    + assert (Q : quota_met (h_step (cfg 0) (hist_of s i) (Reported rs)) = quota_met (hist_of s i)) by (unfold Facts.quota_met, h_samples; rewrite only_sums_add_steps by discriminate; reflexivity). rewrite Q.
      destruct (failure_of rs); [|discriminate]. injection E as <-.
      destruct IH as [U1 U2]. unfold in_count in U1, U2. rewrite Ph in U1, U2. constructor; rewrite drained_is_not_in_count; [exact U1|exact U2].
  - intros s d m la R Hd Dr _. constructor; intros Qm; destruct (growing d Hd Qm) as [_ [Sh _]]; destruct Dr; congruence.
Qed.

(** ** The last round of quota mode *)

(** The target was lowered to the number of samples on the poorest rank. *)
Definition is_lowered (a : offer) : bool := c_is_quota (cfg 0) && (o_samples_min a <? c_rule (cfg 0) a).
Definition lowered (rs : list result) : bool := existsb (fun x => match x with Agreed a => is_lowered a | _ => false end) rs.
(** After these results no later round makes steps. *)
Definition doomed (rs : list result) : bool := quota_met (history (cfg 0) rs) || lowered rs.

Lemma lowered_quota : forall rs, lowered rs = true -> c_is_quota (cfg 0) = true.
Proof.
  intros rs L. unfold lowered in L. apply existsb_exists in L as [x [_ L]]. destruct x; try discriminate. unfold is_lowered in L. apply andb_true_iff in L as [L _]. exact L.
Qed.

Record spent (s : sys) : Prop := {
  sp_lowered : lowered (results s) = true -> match h_kind (whole s) with
    | NCount n => exists q, q < W /\ has_read_all (rank_of s q) /\
        ((at_phase (rank_of s q) = OFFER /\ exists o, posted (rank_of s q) = Some (MOffer o) /\ o_ready o = true /\ o_samples_max o = n) \/
         (at_phase (rank_of s q) = COUNT /\ window (rank_of s q) = []))
    | NOffer => quota_met (whole s) = true \/ exists q, q < W /\ has_read_all (rank_of s q) /\ window (rank_of s q) = []
    | _ => True
    end;
  sp_sound : forall l a n, results s = l ++ [Agreed a] -> h_kind (whole s) = NCount n -> doomed l = false }.

Lemma rank_step_keeps_spent : forall s i e t s', reachable s -> spent s -> i < W -> may cfg input s i e ->
  transition (cfg i) i (depth i) (rank_of s i) e = Some t -> rank_of s' = update (rank_of s) i t -> log s' = log s -> spent s'.
Proof.
  intros s i e t s' R Sp Hi M E Er El. destruct (sound_of ok R) as [I S2 _].
  assert (Rs : results s' = results s) by (unfold results; rewrite El; reflexivity). assert (Wh : whole s' = whole s) by (unfold Facts.whole_from; rewrite Rs; reflexivity).
  constructor; rewrite Rs, Wh; [|apply (sp_sound s Sp)]. intros Lw. pose proof (sp_lowered s Sp Lw) as Old. rewrite Er.
  pose proof (rank_step_after W cfg depth input ok s i e t I Hi M E) as K'. pose proof (g_core _ _ _ _ _ I i Hi) as K. set (u := rank_of s i) in *.
  pose proof (answer_or_own e) as Cases.
  assert (Kt : forall y, e = Got y -> core (cfg i) (cfg 0) i (input i) (whole s) t /\ whole s = h_step (cfg 0) (hist_of s i) y).
  { intros y ->. destruct (got_current W cfg depth input s i y I Hi M) as [_ [_ [Wa _]]]. simpl in K'. rewrite <- Wa in K'. auto. }
  assert (Own : has_read_all u -> has_read_all t) by exact (all_stays_read _ _ _ _ _ _ E).
  assert (Win : has_read_all u -> (forall y, e <> Got y) -> window t = window u) by (intros [_ Z] NG; apply (sa_window _ _ (transition_same _ _ _ _ _ _ NG E)), Z).
  destruct (h_kind (whole s)) as [|n| |o l] eqn:Hk; auto.
  - destruct Old as [Old|[q [Hq [En Wq]]]]; [auto|]. destruct (Nat.eq_dec q i) as [->|NE]; [|right; exists q; rewrite update_other by exact NE; auto]. fold u in En, Wq.
    destruct Cases as [[y ->]|NG]; [|right; exists i; rewrite update_same, (Win En NG); auto]. destruct (Kt y eq_refl) as [K1 Wa]. simpl in E. fold u in E.
    pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K)) as Pk. fold u in Pk. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
    + exfalso. rewrite Wa in Hk. apply (agreed_goes_on (cfg 0) (hist_of s i) a); [|exact Hk]. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. exact Kk.
    + pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. destruct Kk as [Kk Kc]. pose proof (k_gsum _ _ _ _ _ _ K) as Kg. fold u in Kg.
      pose proof (held_count _ _ _ _ _ E) as A. simpl in A. unfold held in A. injection A as A1 A2 A3 A4. destruct (count_cases _ _ _ _ _ E) as [Lc _]. set (n := cut (cfg i) (gsum u) cs) in *.
      destruct (skipn n (aligned u)) as [|g gs] eqn:Sk; [right; exists i; rewrite update_same; simpl in A1; rewrite A1; auto|left].
      assert (Ln : n < length cs) by (assert (L : length (skipn n (aligned u)) = S (length gs)) by (rewrite Sk; reflexivity); rewrite skipn_length in L; lia).
      pose proof (cut_reaches _ _ _ Ln) as Cr. rewrite Wa. unfold Facts.quota_met, h_samples, h_step. rewrite Kk. simpl. rewrite sum_over_app, make_shared_samples. rewrite Kg, Kc in Cr. exact Cr.
    + exfalso. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. rewrite Wa in Hk. unfold h_step in Hk. rewrite Kk in Hk. destruct (failure_of rs); [discriminate|congruence].
  - destruct Old as [q [Hq [En St]]]. exists q. split; [exact Hq|]. destruct (Nat.eq_dec q i) as [->|NE]; [|rewrite update_other by exact NE; auto]. rewrite update_same. fold u in En, St. split; [apply Own, En|].
    destruct Cases as [[y ->]|NG].
    + right. destruct (Kt y eq_refl) as [K1 Wa]. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K1)) as P1. rewrite Hk in P1. split; [exact P1|].
      simpl in E. fold u in E. destruct St as [[Ph [o [Po [Ro Mo]]]]|[Ph _]]; rewrite Ph in E; destruct y as [a|cs|rs]; try discriminate.
      * destruct (agree_cases _ _ _ _ _ _ E) as [C _]. destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|m B Sr Ra Tg _ _ Al Ca]; try congruence.
        destruct (k_offer _ _ _ _ _ _ K Ph) as [o' [Po' O]]. fold u in Po', O. rewrite Po in Po'. injection Po' as <-. destruct (of_ready _ _ _ _ O Ro) as [_ [R2 [R3 [R4 _]]]].
        rewrite (held_is_window _ _ _ _ _ _ (configs_ok _ _ ok i Hi) K Ph R2 R3 (proj1 (every_round i Hi) _)) in R4. rewrite (proj1 (proj2 (every_round i Hi))) in R3.
        rewrite (proj1 (proj2 (proj2 (every_round i Hi)))) in Al, Ca.
        destruct (n_count _ _ _ S2 _ Hk) as [T2 [[_ T1]|[T1 _]]]; [rewrite (proj1 (every_round 0 (some_rank _ _ ok))) in T1; discriminate|]. pose proof (k_kind _ _ _ _ _ _ K1) as Kk. unfold kind_ok in Kk. rewrite P1, Hk in Kk. destruct Kk as [Kk _]. injection Kk as Kk.
        pose proof (ok_align_length _ (configs_ok _ _ ok i Hi) (round u) (groups u) m (due_before (cfg i) u)) as La. rewrite <- Al in La.
        pose proof (Permutation_length (ok_group_perm _ (configs_ok _ _ ok i Hi) (budget u) (window u))) as Lg. rewrite <- R3 in Lg.
        assert (Ln : n = length (concat (groups u))) by (rewrite Lg; destruct (is_quota_met _ _); lia).
        pose proof (ok_group_nonempty _ (configs_ok _ _ ok i Hi) (budget u) (window u)) as Ne. rewrite <- R3 in Ne.
        pose proof (ok_align_work _ (configs_ok _ _ ok i Hi) (round u) (groups u) m (due_before (cfg i) u) Ne ltac:(lia)) as F. rewrite <- Al in F.
        pose proof (Permutation_length (ok_align_perm _ (configs_ok _ _ ok i Hi) (round u) (groups u) m (due_before (cfg i) u))) as Pl. rewrite app_length, <- Al, <- Ca in Pl.
        apply concat_of_nonempty in F.
        destruct (window t) as [|z zs]; [reflexivity|]. simpl in Pl. lia.
      * exfalso. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. destruct Kk as [Kk _]. rewrite Wa in Hk. unfold h_step in Hk. rewrite Kk in Hk. discriminate.
    + rewrite (Win En NG). destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 _]. destruct St as [[Ph X]|[Ph X]]; (destruct S1 as [S3 S4]; [unfold is_waiting; fold u; rewrite Ph; reflexivity|]); fold u in S3, S4; rewrite S3, ?S4; auto.
Qed.

Lemma exchange_keeps_spent : forall s x, reachable s -> spent s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some x ->
  spent (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s)).
Proof.
  intros s x R Sp P Rd. destruct (sound_of ok R) as [I S2 _]. pose proof (some_rank _ _ ok) as SR.
  set (s' := mkSys _ _ _ _ _). assert (Wh : whole s' = h_step (cfg 0) (whole s) x) by (apply whole_snoc). assert (Rs : results s' = results s ++ [x]) by (unfold results, s'; simpl; rewrite map_app; reflexivity).
  assert (Lx : lowered (results s') = lowered (results s) || match x with Agreed a => is_lowered a | _ => false end) by (rewrite Rs; unfold lowered; rewrite existsb_app; simpl; rewrite orb_false_r; reflexivity).
  pose proof (exchange_kind W cfg depth input ok s x I P Rd) as Hk. destruct x as [a|cs|rs].
  - destruct (is_bad a) eqn:B.
    { assert (Hk' : h_kind (whole s') = NReport) by (rewrite Wh; unfold h_step; rewrite Hk, B; reflexivity). constructor; rewrite Hk'; [auto|discriminate]. }
    destruct (o_stop_rank a) as [q0|] eqn:Sr.
    { assert (Hk' : exists o l, h_kind (whole s') = NClosed o l) by (rewrite Wh; unfold h_step; rewrite Hk, B, Sr; simpl; eauto). destruct Hk' as [o [l Hk']]. constructor; rewrite Hk'; [auto|discriminate]. }
    destruct (target (cfg 0) a) as [|n] eqn:Tg.
    { assert (Hk' : exists o l, h_kind (whole s') = NClosed o l) by (rewrite Wh; unfold h_step; rewrite Hk, B, Sr, Tg; simpl; eauto). destruct Hk' as [o [l Hk']]. constructor; rewrite Hk'; [auto|discriminate]. }
    assert (Hk' : h_kind (whole s') = NCount n) by (rewrite Wh; unfold h_step; rewrite Hk, B, Sr, Tg; reflexivity).
    destruct (good_agreement_facts W cfg depth input ok s a I P Rd B Sr) as [G1 [G2 [[p [Hp [op [Pop Mop]]]] [q [Hq [o [Po Mo]]]]]]].
    destruct (target_makes _ _ _ Tg) as [NZ [Mi Tn]]. rewrite (proj2 (proj2 (proj2 (every_round 0 SR)))) in Tn. destruct (G2 NZ) as [Qf Sa]. specialize (Sa (proj1 (every_round 0 SR) _)).
    assert (Fresh : lowered (results s) = false).
    { destruct (lowered (results s)) eqn:L; [exfalso|reflexivity]. pose proof (sp_lowered s Sp L) as Old. rewrite Hk in Old. destruct Old as [Old|[i [Hi [[En _] Wi]]]]; [congruence|].
      destruct (G1 i Hi) as [oi [_ [_ [_ [_ [_ [M1 M2]]]]]]]. unfold held_of in M2. rewrite (plain i Hi), Qf, Wi in M2. simpl in M2. specialize (Mi (lowered_quota _ L)). lia. }
    constructor.
    + rewrite Lx, Fresh, Hk'. simpl. intros Lw. unfold is_lowered in Lw. apply andb_true_iff in Lw as [Lq Lw]. apply Nat.ltb_lt in Lw.
      destruct (G1 q Hq) as [o' [Po' [Phq [Ro [Wq [M1 [M2 M3]]]]]]]. rewrite Po in Po'. injection Po' as <-.
      destruct (G1 p Hp) as [o'' [Pp' [Php [_ [Wp [_ [_ M4]]]]]]]. rewrite Pop in Pp'. injection Pp' as <-.
      rewrite Lq in Tn. assert (Tm : n = o_samples_min a) by lia.
      assert (Same : forall r, r < W -> cfg r = cfg 0).
      { intros r H. exact (good_agreement W cfg SR (prints_differ _ _ ok) (messages W s) a r (exchange_entry W cfg depth input s _ I P Rd) B H). }
      exists q. split; [exact Hq|]. split; [|left; split; [exact Phq|]; exists o; simpl; repeat split; [exact Po|exact Ro|congruence]].
      split; [|exact Wq]. simpl. destruct (ended (rank_of s q)) eqn:En; [reflexivity|exfalso].
      assert (Qq : c_is_quota (cfg q) = true) by (rewrite (Same q Hq); exact Lq). pose proof (u_full _ _ _ _ (reachable_full s R q Hq) Qq En) as Fq. unfold in_count in Fq. rewrite Phq, Wq, !Nat.add_0_r, (Same q Hq) in Fq.
      pose proof (u_cap _ _ _ _ (reachable_full s R p Hp)) as Cp. rewrite (Same p Hp) in Cp. specialize (Cp Lq).
      destruct (pending_current W cfg depth input s p I Hp (P p Hp)) as [Wp' _]. destruct (pending_current W cfg depth input s q I Hq (P q Hq)) as [Wq' _].
      rewrite Wp', Qf in Cp. destruct Cp as [Cp|Cp]; [discriminate|]. unfold in_count in Cp. rewrite Php, Wp, !Nat.add_0_r in Cp.
      pose proof (k_round _ _ _ _ _ _ (g_core _ _ _ _ _ I p Hp)) as Kp. pose proof (k_round _ _ _ _ _ _ (g_core _ _ _ _ _ I q Hq)) as Kq. rewrite Wp' in Kp. rewrite Wq' in Kq. rewrite Kp in Cp. rewrite Kq in Fq.
      pose proof (proj2 (proj2 (growing q Hq Qq)) p _ _ (Nat.le_refl (h_round (whole s)))) as Pq. rewrite (Same q Hq) in Pq.
      pose proof (ok_rule _ (configs_ok _ _ ok 0 ltac:(lia)) a Sa) as Bd. pose proof (ok_window _ (configs_ok _ _ ok 0 SR) p (h_round (whole s)) (proj1 (every_round 0 SR) _)) as Wp1.
      rewrite Qf in M3, M4. unfold held_of in M3, M4. rewrite (plain q Hq) in M3. rewrite (plain p Hp) in M4. simpl in M3, M4. lia.
    + intros l a' n' El _. rewrite Rs in El. apply app_inj_tail in El as [<- _]. unfold doomed. rewrite Fresh, orb_false_r. exact Qf.
  - destruct (pending_counts W cfg depth input s cs I P Rd) as [X1 _].
    assert (Hk' : h_kind (whole s') = NOffer) by (rewrite Wh; unfold h_step; rewrite Hk; reflexivity). constructor; [|intros l a n El _; rewrite Rs in El; apply app_inj_tail in El as [_ El]; discriminate].
    rewrite Lx, orb_false_r, Hk'. intros Lw. pose proof (sp_lowered s Sp Lw) as Old. rewrite Hk in Old. destruct Old as [q [Hq [En [[Pq _]|[_ Wq]]]]]; [destruct (X1 q Hq) as [Pq' _]; congruence|].
    right. exists q. auto.
  - assert (Hk' : h_kind (whole s') = NReport \/ exists o l, h_kind (whole s') = NClosed o l) by (rewrite Wh; unfold h_step; rewrite Hk; destruct (failure_of rs); simpl; eauto).
    constructor; destruct Hk' as [Hk'|[o [l Hk']]]; rewrite Hk'; auto; discriminate.
Qed.

Lemma reachable_spent : forall s, reachable s -> spent s.
Proof.
  induction 1 as [|s l t R IH St]; [constructor; simpl; [discriminate|discriminate]|]. destruct St as [s i e t Hi M E|s x P Rd|s i Hi Ru Tk|s d m la Hd Dr].
  - eapply rank_step_keeps_spent; eauto.
  - apply exchange_keeps_spent; assumption.
  - destruct IH. constructor; assumption.
  - destruct IH as [S1 S2]. constructor; [|exact S2]. intros L. specialize (S1 L).
    assert (Rest : forall q, has_read_all (rank_of s q) -> has_read_all (rank_of (drawn s d m la) q)).
    { intros q X. destruct (Nat.eq_dec q d) as [->|NE]; [destruct Dr as [_ [En _]], X; congruence|rewrite drawn_other by exact NE; exact X]. }
    change (h_kind (whole (drawn s d m la))) with (h_kind (whole s)). destruct (h_kind (whole s)); auto.
    + destruct S1 as [S1|[q [Hq [En S1]]]]; [left; exact S1|right]. exists q. auto.
    + destruct S1 as [q [Hq [En S1]]]. exists q. auto.
Qed.

(** ** Marks and ages *)

Record young (age : nat) (doom : bool) (s : state) (m : list nat) : Prop := {
  y_read : forall k, k < length m -> nth k m 0 <= read s;
  y_marks : marks s = last_n age m;
  y_length : length m = round s + in_count s;
  y_window : forall x k, In x (window s) -> k < length m -> pos x < nth k m 0 -> length m <= k + age \/ doom = true;
  y_count : forall x k, at_phase s = COUNT -> In x (concat (aligned s) ++ window s) -> k < length m -> pos x < nth k m 0 -> round s <= k + age;
  y_last : forall y x k, In y (steps_of s) -> In x (concat (aligned s) ++ window s) -> k < length m -> pos x < nth k m 0 -> s_round y <= k + age;
  y_steps : forall y x k, In y (steps_of s) -> In x (s_group y) -> k < length m -> pos x < nth k m 0 -> s_round y <= k + age }.

Lemma nth_snoc : forall (m : list nat) v k, k < length (m ++ [v]) -> (k < length m /\ nth k (m ++ [v]) 0 = nth k m 0) \/ (k = length m /\ nth k (m ++ [v]) 0 = v).
Proof.
  intros m v k L. rewrite app_length in L. simpl in L. destruct (lt_dec k (length m)) as [H|H]; [left; split; [exact H|apply app_nth1, H]|right].
  assert (k = length m) by lia. subst. split; [reflexivity|]. rewrite app_nth2, Nat.sub_diag by lia. reflexivity.
Qed.

(** Whether the results that rank [r] has received rule out steps in later rounds. *)
Definition doom (s : sys) (r : nat) : bool := doomed (seen s r).

Lemma doomed_snoc : forall l x, doomed l = true -> doomed (l ++ [x]) = true.
Proof.
  intros l x D. unfold doomed in *. apply orb_true_iff in D as [D|D]; apply orb_true_iff; [left|right].
  - rewrite history_snoc. unfold Facts.quota_met, is_quota_met in *. destruct (c_quota (cfg 0)) as [q|]; [|discriminate]. apply Nat.leb_le in D. apply Nat.leb_le.
    destruct (h_step_grows (cfg 0) (history (cfg 0) l) x (history_released _ _)) as [[ext [E _]] _]. unfold h_samples in *. rewrite E, sum_over_app. lia.
  - unfold lowered in *. rewrite existsb_app, D. reflexivity.
Qed.

Lemma every_marked_state_is_young : forall s m, marked s m -> forall r, r < W -> young (c_max_age (cfg r)) (doom s r) (rank_of s r) (m r).
Proof.
  induction 1 as [|s l t m M IH St]; intros r H.
  - destruct (initial_phase (cfg r) r) as [Ph|Ph]; constructor; simpl; try lia; try easy; try (intros; simpl in Ph; congruence); unfold in_count; simpl in Ph |- *; rewrite Ph; reflexivity.
  - pose proof (marked_reachable s m M) as R. pose proof (invariant_of W cfg depth input ok s R) as I.
    destruct St as [s i e t Hi My E|s x P Rd|s i Hi Ru Tk|s d n la Hd Dr]; [| |exact (IH r H)|destruct (IH r H); constructor; assumption].
    2:{ match goal with |- young _ (doom ?z r) _ _ => replace (doom z r) with (doom s r); [exact (IH r H)|] end. unfold doom. f_equal. symmetry.
        exact (exchange_adds_nothing_seen s r _ _ (proj1 (proj2 (pending_sync W cfg depth input s r I H (P r H))))). }
    match goal with |- young _ _ (rank_of ?x r) _ => set (s' := x) end.
    destruct (Nat.eq_dec r i) as [->|NE].
    2:{ replace (rank_of s' r) with (rank_of s r) by (simpl; rewrite update_other by exact NE; reflexivity).
        replace (doom s' r) with (doom s r) by (unfold doom, seen, s'; simpl; destruct e; try reflexivity; rewrite update_other by exact NE; reflexivity).
        replace (remark s (LRank i e) s' m r) with (m r); [exact (IH r H)|]. unfold remark. destruct e as [| |[a| |]| | | |]; try reflexivity.
        destruct (at_phase (rank_of s' i)); try reflexivity. rewrite update_other by exact NE. reflexivity. }
    specialize (IH i H). pose proof (g_core _ _ _ _ _ I i H) as K.
    assert (Rt : rank_of s' i = t) by (simpl; apply update_same). rewrite Rt. set (u := rank_of s i) in *. set (age := c_max_age (cfg i)) in *.
    pose proof (ok_age _ (configs_ok _ _ ok i H)) as A1. fold age in A1.
    assert (Early : forall y, In y (steps_of u) -> s_round y < round u) by (intros y; apply (steps_are_of_earlier_rounds W cfg depth input ok s i y R H)).
    pose proof (answer_or_own e) as Cases. destruct Cases as [[y ->]|NG].
    + destruct (got_current W cfg depth input s i y I H My) as [Gl [_ [Wh [ms [El Em]]]]].
      assert (Seen : seen s' i = seen s i ++ [y]).
      { unfold seen, s'. simpl. rewrite update_same. change (results _) with (results s). destruct My as [_ [My _]]. apply firstn_snoc, My. }
      assert (Dm : doom s i = true -> doom s' i = true) by (unfold doom; rewrite Seen; intros D; apply doomed_snoc, D).
      simpl in E. fold u in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
      * destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]].
        assert (Rd : read t = read u /\ round t = round u /\ (at_phase t <> COUNT -> marks t = marks u) /\ (at_phase t = COUNT -> marks t = last_n age (marks u ++ [read u]))).
        { clear - E. each_agreement E B Sr Ra Tg Ea; (split; [reflexivity|]); (split; [reflexivity|]);
            (split; [try reflexivity|intros P; first [discriminate P|reflexivity|drains]]). intros P. contradiction P. reflexivity. }
        destruct Rd as [Rd1 [Rd2 [Rd3 Rd4]]]. destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6 Y7]. unfold in_count in Y3. rewrite Ph in Y3.
        assert (Au : aligned u = []) by (apply (k_aligned _ _ _ _ _ _ K); fold u; rewrite Ph; discriminate).
        assert (Dec : at_phase t = COUNT \/ at_phase t <> COUNT) by (destruct (at_phase t); auto; right; discriminate). destruct Dec as [Pt|Pt].
        -- replace (remark s (LRank i (Got (Agreed a))) s' m i) with (m i ++ [read u]) by (unfold remark; rewrite Rt, Pt, update_same; reflexivity).
           destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
           pose proof (log_entry W cfg depth input s _ _ I El) as EO. destruct (answered_offer W cfg depth input s i a I H My Ph) as [o [os [A [Io [Po O]]]]]. fold u in Po, O.
           pose proof (good_agreement W cfg (some_rank _ _ ok) (prints_differ _ _ ok) _ _ i EO B H) as Ci.
           destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [_ [R3 [_ [_ [_ R7]]]]]].
           destruct (target_makes _ _ _ Tg) as [NZ [_ Tn]]. rewrite (proj2 (proj2 (proj2 (every_round i H)))) in Tn.
           pose proof (logged_agreements_are_sane s R) as LS. rewrite Forall_forall in LS. specialize (LS _ (nth_error_In _ _ El) B Sr NZ).
           pose proof (ok_rule _ (configs_ok _ _ ok i H) a LS) as Bd.
           (* A round makes steps only if nothing was doomed before it. *)
           assert (Hope : doom s i = false).
           { unfold doom, seen. destruct My as [_ [My _]]. pose proof (firstn_snoc _ _ _ _ My) as Fs. rewrite Gl in Fs. rewrite firstn_all2 in Fs by (unfold results; rewrite map_length; lia).
             pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk.
             apply (sp_sound s (reachable_spent s R) _ a n Fs). rewrite Wh. unfold h_step. rewrite Kk, B, Sr, <- Ci, Tg. reflexivity. }
           assert (Wa : forall x k, In x (window u) -> k < length (m i) -> pos x < nth k (m i) 0 -> length (m i) <= k + age).
           { intros x k Hx Lk Lp. destruct (Y4 x k Hx Lk Lp) as [Z|Z]; [exact Z|congruence]. }
           assert (Pm : Permutation (concat (aligned t) ++ window t) (window u)) by (rewrite Al, Ca; exact (formed_perm _ (configs_ok _ _ ok i H) u n R3)).
           rewrite (proj1 (proj2 (proj2 (every_round i H)))) in Ca.
           constructor.
           ++ intros k Lk. rewrite Rd1. destruct (nth_snoc _ _ _ Lk) as [[L ->]|[-> ->]]; [apply Y1, L|lia].
           ++ rewrite (Rd4 Pt), Y2. apply last_n_snoc, A1.
           ++ rewrite app_length, Y3, Rd2. unfold in_count. rewrite Pt. simpl. lia.
           ++ intros x k Hx Lk Lp. destruct (is_lowered a) eqn:Low.
              { right. unfold doom. rewrite Seen. unfold doomed, lowered. rewrite existsb_app. simpl. rewrite Low. rewrite !orb_true_r. reflexivity. }
              left. rewrite app_length. simpl. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [|lia].
              assert (Hu : In x (window u)) by (apply (Permutation_in _ Pm), in_or_app; auto). pose proof (Wa x k Hu L Lp) as B1.
              destruct (Nat.eq_dec (length (m i)) (k + age)) as [Q|Q]; [exfalso|lia].
              assert (Due : count_due (due_before (cfg i) u) (groups u) <= n).
              { rewrite <- R7. pose proof (ag_due _ _ A o Io). unfold is_lowered in Low. rewrite <- Ci in Low. destruct (c_is_quota (cfg i)); simpl in Low; [apply Nat.ltb_ge in Low|]; lia. }
              pose proof (ok_align_due _ (configs_ok _ _ ok i H) (round u) _ _ _ Due) as Fc. rewrite <- Ca in Fc. rewrite Forall_forall in Fc.
              specialize (Fc x Hx). unfold due_before, due_of in Fc. rewrite (plain i H) in Fc. simpl in Fc. rewrite Y2, last_n_length in Fc. fold age in Fc.
              replace (Nat.min age (length (m i)) =? age) with true in Fc by (symmetry; apply Nat.eqb_eq; lia). rewrite last_n_hd in Fc by lia.
              replace (length (m i) - age) with k in Fc by lia. lia.
           ++ intros x k _ Hx Lk Lp. rewrite Rd2. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [|lia].
              pose proof (Wa x k (Permutation_in _ Pm Hx) L Lp). lia.
           ++ intros y x k Hy Hx Lk Lp. rewrite S1 in Hy. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [|specialize (Early y Hy); lia].
              apply (Y6 y x k Hy); [|exact L|exact Lp]. rewrite Au. apply (Permutation_in _ Pm Hx).
           ++ intros y x k Hy Hx Lk Lp. rewrite S1 in Hy. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [apply (Y7 y x k Hy Hx L Lp)|]. specialize (Early y Hy). lia.
        -- replace (remark s (LRank i (Got (Agreed a))) s' m i) with (m i) by (unfold remark; rewrite Rt; destruct (at_phase t); try reflexivity; exfalso; apply Pt; reflexivity).
           destruct (S2 Pt) as [Sa [Sw _]]. constructor; rewrite ?S1, ?Sa, ?Sw, ?Rd1, ?Rd2; auto; [rewrite (Rd3 Pt); exact Y2| | |].
           ++ rewrite (not_in_count t Pt). exact Y3.
           ++ intros x k Hx Lk Lp. destruct (Y4 x k Hx Lk Lp); auto.
           ++ intros x k Z. contradiction.
      * replace (remark s (LRank i (Got (Counted cs))) s' m i) with (m i) by reflexivity.
        pose proof (k_plan _ _ _ _ _ _ K Ph) as Pl. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. fold u in Kk. rewrite Ph in Kk. destruct Kk as [Kk Kc]. pose proof (k_gsum _ _ _ _ _ _ K) as Kg. fold u in Kg.
        unfold count in E. destruct (length cs =? length (aligned u)) eqn:Lc; [|discriminate]. apply Nat.eqb_eq in Lc. simpl in E. injection E as <-.
        set (n := cut (cfg i) (gsum u) cs) in *. set (back := concat (skipn n (aligned u))) in *. set (win := if is_nil back then window u else by_position (window u ++ back)).
        assert (Met : back <> [] -> doom s' i = true).
        { intros Nb. assert (Ln : n < length cs) by (destruct (le_lt_dec (length cs) n) as [L|L]; [exfalso; apply Nb; unfold back; rewrite skipn_all2 by lia; reflexivity|exact L]).
          pose proof (cut_reaches _ _ _ Ln) as Cr. unfold doom. rewrite Seen. unfold doomed. apply orb_true_iff. left. rewrite history_snoc. change (history _ _) with (hist_of s i).
          unfold Facts.quota_met, h_samples, h_step. rewrite Kk. simpl. rewrite sum_over_app, make_shared_samples. unfold n in Cr. rewrite Kg, Kc in Cr. exact Cr. }
        assert (Inw : forall x, In x win -> In x (concat (aligned u) ++ window u)).
        { intros x Hx. apply in_or_app. unfold win in Hx. destruct back as [|b bs] eqn:Eb; simpl in Hx; [auto|]. apply (Permutation_in _ (sort_by_perm _ _ _)) in Hx || (unfold by_position in Hx; eapply Permutation_in in Hx; [|apply sort_by_perm]).
          apply in_app_or in Hx as [Hx|Hx]; [auto|left]. rewrite <- (firstn_skipn n (aligned u)), concat_app. apply in_or_app. right. fold back. rewrite Eb. exact Hx. }
        match goal with |- young _ _ (post ?c ?r ?v) _ => set (v0 := v); assert (Ag1 : marks (post c r v0) = marks v0) by reflexivity; assert (Ag2 : read (post c r v0) = read v0) by reflexivity; assert (Ag3 : window (post c r v0) = window v0) by reflexivity; assert (Ag4 : round (post c r v0) = round v0) by reflexivity;
          assert (Pp : at_phase (post c r v0) <> COUNT) by (destruct (post_phase c r v0) as [-> |[_ ->]]; discriminate) end.
        destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6 Y7]. unfold in_count in Y3. rewrite Ph in Y3.
        assert (Sp : forall y, In y (steps_of (post (cfg i) i v0)) -> In y (steps_of u) \/ (s_round y = round u /\ In (s_group y) (firstn n (aligned u)))).
        { intros y Hy. unfold steps_of, v0 in Hy. simpl in Hy. rewrite !app_assoc in Hy. apply in_app_or in Hy as [Hy|Hy]; [left|right].
          - unfold steps_of. rewrite Pl, app_nil_r, !app_assoc. exact Hy.
          - apply make_steps_in in Hy as [-> Hg]. auto. }
        assert (Wv : window v0 = win) by reflexivity.
        constructor; rewrite ?Ag1, ?Ag2, ?Ag3, ?Ag4, ?Wv; auto.
        -- rewrite (not_in_count _ Pp), Y3. simpl. lia.
        -- intros x k Hx Lk Lp. assert (Dn : is_nil back = true \/ back <> []) by (clear; destruct back; [left; reflexivity|right; discriminate]). destruct Dn as [Nb|Nb].
           ++ assert (Hu : In x (window u)) by (unfold win in Hx; rewrite Nb in Hx; exact Hx). destruct (Y4 x k Hu Lk Lp); auto.
           ++ right. apply Met, Nb.
        -- intros x k Z. contradiction.
        -- intros y x k Hy Hx Lk Lp. apply Inw in Hx. destruct (Sp y Hy) as [Hy'|[-> _]]; [apply (Y6 y x k Hy' Hx Lk Lp)|apply (Y5 x k Ph Hx Lk Lp)].
        -- intros y x k Hy Hx Lk Lp. destruct (Sp y Hy) as [Hy'|[-> Hg]]; [apply (Y7 y x k Hy' Hx Lk Lp)|]. apply (Y5 x k Ph); auto. apply in_or_app. left. apply in_concat. exists (s_group y). split; [|exact Hx].
           rewrite <- (firstn_skipn n (aligned u)). apply in_or_app. auto.
      * replace (remark s (LRank i (Got (Reported rs))) s' m i) with (m i) by reflexivity. destruct (failure_of rs); [|discriminate]. injection E as <-.
        destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6 Y7]. unfold in_count in Y3. rewrite Ph in Y3.
        constructor; rewrite ?drain_steps, ?drained_is_not_in_count; auto.
        -- intros x k Hx Lk Lp. destruct (Y4 x k Hx Lk Lp); auto.
        -- intros x k Z. drains.
    + replace (remark s (LRank i e) s' m i) with (m i) by (unfold remark; destruct e as [| |y| | | |]; try reflexivity; exfalso; eapply NG; reflexivity).
      replace (doom s' i) with (doom s i) by (unfold doom, seen, s'; simpl; destruct e; try reflexivity; exfalso; eapply NG; reflexivity).
      pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. fold u in Ag. unfold aged in Ag. injection Ag as Ag1 Ag2 Ag3 Ag4. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. fold u in Sm.
      pose proof (own_event_keeps_in_count _ _ _ _ _ _ NG E) as Cp. fold u in Cp.
      destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6 Y7].
      assert (New : forall x k, In x (reads e) -> k < length (m i) -> pos x < nth k (m i) 0 -> False).
      { intros x k Hx Lk Lp. specialize (Y1 k Lk).
        destruct e as [xs en full| | | | | |]; try (destruct Hx; fail). simpl in Hx. destruct My as [Ex _]. fold u in Ex. rewrite Ex in Hx.
        apply In_nth_error in Hx as [j Hj]. apply nth_error_of_firstn in Hj as [_ Hj]. rewrite nth_error_of_skipn in Hj. apply (placed i _ _ H) in Hj. lia. }
      assert (Old : forall x k, In x (concat (aligned u) ++ window u ++ reads e) -> k < length (m i) -> pos x < nth k (m i) 0 -> In x (concat (aligned u) ++ window u)).
      { intros x k Hx Lk Lp. rewrite app_assoc in Hx. apply in_app_or in Hx as [Hx|Hx]; [exact Hx|]. exfalso. apply (New x k Hx Lk Lp). }
      constructor; rewrite ?Ag1, ?Ag2, ?Ag3, ?Ag4, ?(sa_aligned _ _ Sm), ?(sa_steps _ _ Sm); auto.
      * intros k Lk. specialize (Y1 k Lk). lia.
      * rewrite Cp. exact Y3.
      * intros x k Hx Lk Lp. apply in_app_or in Hx as [Hx|Hx]; [apply (Y4 x k Hx Lk Lp)|]. exfalso. apply (New x k Hx Lk Lp).
      * intros x k Pt Hx Lk Lp. apply (Y5 x k); [|apply (Old x k Hx Lk Lp)|exact Lk|exact Lp]. unfold in_count in Cp. rewrite Pt in Cp. destruct (at_phase u); congruence.
      * intros y x k Hy Hx Lk Lp. apply (Y6 y x k Hy (Old x k Hx Lk Lp) Lk Lp).
Qed.

(** AGE: [m r] holds the marks of rank [r]. Entry [k] is the number of samples that it had read by the end of the window of round [k].
    In either mode, a sample that is planned is planned in time. *)
Theorem a_sample_held_in_a_round_is_planned_at_most_max_age_rounds_later : forall s m r y x k, marked s m -> r < W ->
  In y (steps_of (rank_of s r)) -> In x (s_group y) -> k < length (m r) -> pos x < nth k (m r) 0 -> s_round y <= k + c_max_age (cfg r).
Proof. intros s m r y x k M H. apply (y_steps _ _ _ _ (every_marked_state_is_young s m M r H)). Qed.

Theorem what_is_due_is_what_was_held_max_age_rounds_before : forall s m r, marked s m -> r < W -> at_phase (rank_of s r) <> COUNT ->
  due_before (cfg r) (rank_of s r) =
  if c_max_age (cfg r) <=? round (rank_of s r) then nth (round (rank_of s r) - c_max_age (cfg r)) (m r) 0 else 0.
Proof.
  intros s m r M H P. pose proof (every_marked_state_is_young s m M r H) as Y. pose proof (ok_age _ (configs_ok _ _ ok r H)) as A1.
  pose proof (y_length _ _ _ _ Y) as L. rewrite (not_in_count _ P), Nat.add_0_r in L. unfold due_before, due_of. rewrite (plain r H). cbn [negb is_some andb]. rewrite (y_marks _ _ _ _ Y), last_n_length, L.
  destruct (c_max_age (cfg r) <=? round (rank_of s r)) eqn:B.
  - apply Nat.leb_le in B. replace (Nat.min _ _ =? _) with true by (symmetry; apply Nat.eqb_eq; lia). rewrite last_n_hd by lia. rewrite L. reflexivity.
  - apply Nat.leb_gt in B. replace (Nat.min _ _ =? _) with false by (symmetry; apply Nat.eqb_neq; lia). reflexivity.
Qed.

(** Later marks are at least the number of samples read before. *)
Lemma later_marks : forall s t, leads s t -> forall m, marked s m -> exists m', marked t m' /\
  forall r, read (rank_of s r) <= read (rank_of t r) /\ exists more, m' r = m r ++ more /\ Forall (fun v => read (rank_of s r) <= v) more.
Proof.
  induction 1 as [s|s t l u L IH St]; intros m M.
  - exists m. split; [exact M|]. intros r. split; [lia|]. exists []. rewrite app_nil_r. auto.
  - destruct (IH m M) as [m' [M' X]]. exists (remark t l u m'). split; [eapply marked_step; eauto|]. intros r. destruct (X r) as [X1 [more [X2 X3]]]. split.
    + destruct St as [t i e v Hi My E|t x P Rd|t i Hi Ru Tk|t d n la Hd Dr]; simpl; try exact X1. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same; apply read_grows in E; lia|rewrite update_other by exact NE; exact X1].
    + assert (Keep : exists more, m' r = m r ++ more /\ Forall (fun v => read (rank_of s r) <= v) more) by eauto.
      destruct l as [i e| |i|i n la]; simpl; try exact Keep. destruct e as [| |[a| |]| | | |]; try exact Keep. destruct (at_phase (rank_of u i)); try exact Keep.
      destruct (Nat.eq_dec r i) as [->|NE]; [|rewrite update_other by exact NE; exact Keep]. rewrite update_same. exists (more ++ [read (rank_of t i)]). rewrite X2, app_assoc. split; [reflexivity|].
      apply Forall_app. split; [exact X3|]. constructor; [exact X1|constructor].
Qed.

(** AGE, in either mode: [x] is held in the window of a round. When that round and [max_age] more are over, either [x] is in a step of one
    of them, or the results rule out steps in later rounds, and there are none. *)
Lemma planned_in_time_or_doomed : forall s t r x, reachable s -> leads s t -> r < W ->
  at_phase (rank_of s r) <> COUNT -> In x (window (rank_of s r)) -> round (rank_of s r) + c_max_age (cfg r) < round (rank_of t r) ->
  (exists y, In y (steps_of (rank_of t r)) /\ In x (s_group y) /\ s_round y <= round (rank_of s r) + c_max_age (cfg r)) \/
  (doom t r = true /\ forall y, In y (steps_of (rank_of t r)) -> s_round y <= round (rank_of s r) + c_max_age (cfg r)).
Proof.
  intros s t r x R Ld H P Hx Lr. destruct (every_reachable_state_is_marked s R) as [m M]. destruct (later_marks s t Ld m M) as [m' [M' X]].
  destruct (X r) as [X1 [more [X2 X3]]]. pose proof (leads_reachable _ _ _ _ s t Ld R) as R'.
  pose proof (y_length _ _ _ _ (every_marked_state_is_young s m M r H)) as L. pose proof (every_marked_state_is_young t m' M' r H) as Y.
  rewrite (not_in_count _ P), Nat.add_0_r in L.
  pose proof (y_length _ _ _ _ Y) as L'. assert (Lk : round (rank_of s r) < length (m' r)) by lia.
  assert (V : read (rank_of s r) <= nth (round (rank_of s r)) (m' r) 0).
  { rewrite X2, app_length in *. rewrite app_nth2, L, Nat.sub_diag by lia. destruct more as [|v more]; [simpl in *; lia|]. inversion X3; subst. assumption. }
  pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok s R) r H) as K. pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok t R') r H) as K'.
  assert (Hi : In x (firstn (read (rank_of s r)) (input r))).
  { apply (Permutation_in _ (k_cons _ _ _ _ _ _ K)). apply in_or_app. right. apply in_or_app. right. exact Hx. }
  assert (Px : pos x < nth (round (rank_of s r)) (m' r) 0).
  { apply In_nth_error in Hi as [j Hj]. apply nth_error_of_firstn in Hj as [Lj Hj]. rewrite (placed r j x H Hj). lia. }
  assert (Ht : In x (firstn (read (rank_of t r)) (input r))).
  { replace (read (rank_of t r)) with (read (rank_of s r) + (read (rank_of t r) - read (rank_of s r))) by lia. rewrite firstn_add. apply in_or_app. auto. }
  apply (Permutation_in _ (Permutation_sym (k_cons _ _ _ _ _ _ K'))) in Ht. apply in_app_or in Ht as [Ht|Ht]; [left|].
  - unfold samples_of in Ht. apply in_concat in Ht as [g [Hg Hx']]. apply in_map_iff in Hg as [y [<- Hy]]. exists y. split; [exact Hy|]. split; [exact Hx'|].
    apply (y_steps _ _ _ _ Y y x _ Hy Hx' Lk Px).
  - assert (Pt : at_phase (rank_of t r) <> COUNT).
    { intros Pt. pose proof (y_count _ _ _ _ Y x _ Pt Ht Lk Px). lia. }
    right. split; [|intros y Hy; apply (y_last _ _ _ _ Y y x _ Hy Ht Lk Px)].
    rewrite (k_aligned _ _ _ _ _ _ K' Pt) in Ht. simpl in Ht. destruct (y_window _ _ _ _ Y x _ Ht Lk Px) as [B|B]; [lia|exact B].
Qed.

Theorem in_either_mode_a_sample_is_planned_in_time_or_no_later_round_makes_a_step : forall s t r x, reachable s -> leads s t -> r < W ->
  at_phase (rank_of s r) <> COUNT -> In x (window (rank_of s r)) -> round (rank_of s r) + c_max_age (cfg r) < round (rank_of t r) ->
  (exists y, In y (steps_of (rank_of t r)) /\ In x (s_group y) /\ s_round y <= round (rank_of s r) + c_max_age (cfg r)) \/
  (forall y, In y (steps_of (rank_of t r)) -> s_round y <= round (rank_of s r) + c_max_age (cfg r)).
Proof. intros s t r x R Ld H P Hx Lr. destruct (planned_in_time_or_doomed s t r x R Ld H P Hx Lr) as [A|[_ A]]; auto. Qed.

End Age.

Section Join.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
(** Every round forms steps. *)
Hypothesis plain : forall r, r < W -> c_updates (cfg r) = None.
(** Join mode on every rank; positions count a rank's input from 0. *)
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
Hypothesis placed : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation reachable := (System.reachable W cfg depth input).
Notation leads := (System.leads W cfg depth input).
Notation marked := (Age.marked W cfg depth input).

Lemma join_growing : forall r, r < W -> c_is_quota (cfg r) = true -> c_bounded (cfg r) r = false /\ c_shares (cfg r) = false /\ forall p k j, k <= j -> c_window (cfg r) p k <= c_window (cfg r) r j.
Proof. intros r H Q. destruct (join r H). congruence. Qed.

Lemma never_doomed : forall s r, doom cfg s r = false.
Proof.
  intros s r. destruct (join 0 (some_rank _ _ ok)) as [J1 J2]. unfold doom, doomed. apply orb_false_iff. split.
  - unfold quota_met, is_quota_met. rewrite J2. reflexivity.
  - destruct (lowered cfg _) eqn:L; [|reflexivity]. apply lowered_quota in L. congruence.
Qed.

Theorem a_held_sample_is_never_older_than_max_age_rounds : forall s m r x k, marked s m -> r < W ->
  In x (window (rank_of s r)) -> k < length (m r) -> pos x < nth k (m r) 0 -> round (rank_of s r) <= k + c_max_age (cfg r).
Proof.
  intros s m r x k M H Hx Lk Lp. pose proof (every_marked_state_is_young W cfg depth input ok plain join_growing placed s m M r H) as Y. rewrite never_doomed in Y.
  destruct (y_window _ _ _ _ Y x k Hx Lk Lp); [|discriminate]. pose proof (y_length _ _ _ _ Y). lia.
Qed.

(** AGE, as in spec/properties.md: [x] is held in the window of a round. When that round and [max_age] more are over, [x] is in a step of
    one of them. *)
Theorem a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest : forall s t r x, reachable s -> leads s t -> r < W ->
  at_phase (rank_of s r) <> COUNT -> In x (window (rank_of s r)) -> round (rank_of s r) + c_max_age (cfg r) < round (rank_of t r) ->
  exists y, In y (steps_of (rank_of t r)) /\ In x (s_group y) /\ s_round y <= round (rank_of s r) + c_max_age (cfg r).
Proof.
  intros s t r x R Ld H P Hx Lr. destruct (planned_in_time_or_doomed W cfg depth input ok plain join_growing placed s t r x R Ld H P Hx Lr) as [A|[D _]]; [exact A|].
  rewrite never_doomed in D. discriminate.
Qed.

End Join.
