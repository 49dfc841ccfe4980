(** UPDATE if ranks share an order (R16.4): each update is dealt in portions, one to a round, whatever loads the ranks tell each other. What a
    rank draws in an update stays in its window until the last round, which makes a step of it. Spec: R14, R16. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Rules Alignment Layouts Runs Machine Local Rank System Facts Keeps Protocol Age Rounds Instance Loss Shards Drawing Job Lively Updates.
Import ListNotations.

Section Dealt.
(** An update has [n] places and takes [p] rounds; before round [k] the ranks tell each other that they hold [loads k] tokens. *)
Variables (W total n p : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample) (loads : nat -> list nat).
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis rounds : 2 <= p.
Hypothesis in_rounds : forall r, r < W -> c_updates (cfg r) = Some p.
Hypothesis not_empty : 1 <= total.
Hypothesis one_each : forall k, length (loads k) = W.
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].

Notation part := (by_load n p total loads).
Notation portion_of := (Shards.portion_of n p total).
Notation place := (Shards.place n p total).
Notation first_of := (Shards.first_of n total).
Definition deal : nat -> (nat -> nat) -> nat -> nat -> list nat := fun k _ => part k.
Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation content := (content order).
Notation drawn := (Shards.drawn W deal).
Notation drawn_by := (Shards.drawn_by W deal).
Notation own := (shared_config cfg deal).

Lemma updating : forall r, r < W -> c_updates (own r) <> None.
Proof. intros r H. change (c_updates (cfg r) <> None). rewrite (in_rounds r H). discriminate. Qed.

Lemma has_steps_in_rounds : forall r k, r < W -> has_steps (cfg r) k = (S k mod p =? 0).
Proof. intros r k H. unfold has_steps, update_rounds. rewrite (in_rounds r H). reflexivity. Qed.

Lemma some_rounds : forall r, r < W -> 1 <= update_rounds (own r).
Proof. intros r H. exact (ok_updates _ (configs_ok _ _ ok r H)). Qed.

Lemma dealt_out_size : forall k ws d, length (dealt_out W deal k ws d) = portion_of k d.
Proof.
  intros k ws d. destruct (portions_by_load_are_the_next_places W n p total (some_rank _ _ ok) rounds loads one_each k d) as [P _]. unfold dealt_out, deal.
  rewrite (Permutation_length P), seq_length. reflexivity.
Qed.

Lemma deal_next : forall k ws d, exists m, m <= total - d /\ Permutation (dealt_out W deal k ws d) (seq d m).
Proof.
  intros k ws d. destruct (portions_by_load_are_the_next_places W n p total (some_rank _ _ ok) rounds loads one_each k d) as [P L]. exists (portion_of k d). split; [exact L|exact P].
Qed.

Lemma deal_first : begins_by_drawing W total cfg deal.
Proof.
  right. split; [|split; [exact not_empty|]].
  - intros r H. rewrite (has_steps_in_rounds r 0 H), Nat.mod_small by lia. reflexivity.
  - intros ws d r. unfold deal, by_load, draw. replace (portion_of 0 d) with 0 by (unfold Shards.portion_of; rewrite Nat.mod_0_l by lia; reflexivity).
    rewrite an_empty_portion_gives_nothing. reflexivity.
Qed.

Lemma all_have_begun : forall s r, shared_reachable s -> r < W -> begun s r = true.
Proof.
  intros s r R H. destruct (begun s r) eqn:Bg; [reflexivity|].
  destruct (b_fresh _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ (shared_books W total cfg depth order deal wish ok deal_next deal_first s R) r H) Bg) as [Hs _].
  rewrite (has_steps_in_rounds r 0 H), Nat.mod_small in Hs by lia. discriminate.
Qed.

(** What a rank draws in [m] rounds from round [i] on, and where the draw of a round begins in what the rank has drawn. *)
Definition parts (r i m : nat) : list nat := concat (map (fun k => part k (place k) r) (seq i m)).
Notation begins r := (begin_of (fun k => length (part k (place k) r))).

Lemma parts_app : forall r i a b, parts r i (a + b) = parts r i a ++ parts r (i + a) b.
Proof. intros r i a b. unfold parts. rewrite seq_app, map_app, concat_app. reflexivity. Qed.

Lemma parts_one : forall r i, parts r i 1 = part i (place i) r.
Proof. intros r i. unfold parts. cbn [seq map concat]. apply app_nil_r. Qed.

Lemma parts_length : forall r i m, length (parts r i m) = begins r (i + m) - begins r i.
Proof.
  intros r i m. induction m as [|m IH]; [rewrite Nat.add_0_r, Nat.sub_diag; reflexivity|]. rewrite <- (Nat.add_1_r m), parts_app, app_length, IH, parts_one.
  replace (i + (m + 1)) with (S (i + m)) by lia. cbn [begin_of]. pose proof (begin_of_rises (fun k => length (part k (place k) r)) i (i + m) ltac:(lia)). simpl in *. lia.
Qed.

Lemma drawn_in_rounds : forall l, drawn l = place (length l).
Proof. induction l as [|ws before IH]; cbn [Shards.drawn length Shards.place]; [reflexivity|]. rewrite IH, dealt_out_size. reflexivity. Qed.

Lemma drawn_parts : forall r l, drawn_by r l = parts r 0 (length l).
Proof.
  intros r. induction l as [|ws before IH]; cbn [Shards.drawn_by length]; [reflexivity|]. rewrite <- Nat.add_1_r, parts_app, IH, drawn_in_rounds, parts_one. reflexivity.
Qed.

Lemma place_rises : forall i m, place i <= place (i + m).
Proof. intros i m. induction m as [|m IH]; [rewrite Nat.add_0_r; apply le_n|rewrite Nat.add_succ_r; cbn [Shards.place]; lia]. Qed.

Lemma parts_are_the_next_places : forall i m, Permutation (concat (map (fun r => parts r i m) (ranks W))) (seq (place i) (place (i + m) - place i)).
Proof.
  intros i m. induction m as [|m IH].
  - rewrite Nat.add_0_r, Nat.sub_diag. unfold parts. simpl. induction (ranks W) as [|r l IHl]; [constructor|exact IHl].
  - pose proof (place_rises i m).
    rewrite Nat.add_succ_r. cbn [Shards.place]. replace (place (i + m) + portion_of (i + m) (place (i + m)) - place i) with ((place (i + m) - place i) + portion_of (i + m) (place (i + m))) by lia.
    rewrite seq_app. replace (place i + (place (i + m) - place i)) with (place (i + m)) by lia.
    transitivity (concat (map (fun r => parts r i m ++ part (i + m) (place (i + m)) r) (ranks W))).
    + apply each_gives. intros r _. rewrite <- Nat.add_1_r, parts_app, parts_one. reflexivity.
    + eapply Permutation_trans; [apply concat_map_app|]. apply Permutation_app; [exact IH|]. apply (portions_by_load_are_the_next_places W n p total (some_rank _ _ ok) rounds loads one_each).
Qed.

Lemma positions_of_content : forall l q y, In y (content_from order q l) -> q <= pos y < q + length l.
Proof.
  intros l q y I. apply In_nth_error in I as [i E]. rewrite (content_is_numbered order l q i y E), <- (content_from_length order l q). assert (i < length (content_from order q l)) by (apply nth_error_Some; congruence). lia.
Qed.

(** What a rank has drawn, by rounds. *)
Lemma places_by_rounds : forall s r, shared_reachable s -> r < W -> let k := S (round (rank_of (base s) r)) in
  places s r = parts r 0 k /\ upto s r = place k /\ length (places s r) = begins r k.
Proof.
  intros s r R H k. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_first s r R H (all_have_begun s r R H)) as [Ep [Eu L]].
  rewrite Ep, Eu, drawn_parts, drawn_in_rounds, L. split; [reflexivity|]. split; [reflexivity|]. rewrite parts_length. simpl begin_of at 2. apply Nat.sub_0_r.
Qed.

(** ** A rank holds what it has drawn in the update for which it drew it *)

Definition holds_what_it_drew (r : nat) (u : state) : Prop := (is_lost u = false -> in_place (begins r) (own r) u) /\ laid (begins r) (own r) u /\ begins r (round u) <= read u.

(** What a rank reads lies after the rounds that are over, and before the end of what it has drawn. *)
Lemma own_event_holds : forall r c d u e t, r < W -> (forall y, e <> Got y) -> transition c r d u e = Some t -> holds_what_it_drew r u ->
  (forall y, In y (reads e) -> begins r (round u) <= pos y /\ (is_lost u = false -> begins r (coming u) <= pos y < begins r (S (coming u)))) -> holds_what_it_drew r t.
Proof.
  intros r c d u e t H NG E [P [[L1 L2] Rd]] Re. pose proof (own_event_leaves_lost _ _ _ _ _ _ NG E) as El. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm.
  pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. unfold aged in Ag. injection Ag as _ Ar Aw Ao.
  assert (Lo : forall k, begins r (first_round (own r) k) <= begins r k) by (intros k; apply begin_of_rises, the_first_round_is_no_later, some_rounds, H).
  split; [|split].
  - intros L. rewrite El in L. refine (proj1 (what_is_held_stays_in_place (begins r) (own r) c r d u e t NG E (P L) _)). intros y I. destruct (Re y I) as [_ B]. specialize (B L). pose proof (Lo (coming u)). lia.
  - constructor; unfold steps_in_place in *; rewrite ?(sa_steps _ _ Sm), ?(sa_aligned _ _ Sm), ?Ao, ?Aw; [exact L1|]. intros y [I|I]; [auto|]. apply in_app_iff in I as [I|I]; [auto|]. pose proof (Lo (round u)). destruct (Re y I). lia.
  - rewrite Ao, Ar. lia.
Qed.

(** Only a rank that is not lost receives a result. *)
Lemma answer_holds : forall s r y u t, lossy_reachable W own depth (fun q => content (places s q)) (base s) -> r < W ->
  (forall a, y = Agreed a -> u = rank_of (base s) r /\ may own (fun q => content (places s q)) (base s) r (Got y)) ->
  holds_what_it_drew r (rank_of (base s) r) -> (exists k la, u = draws k la (rank_of (base s) r)) ->
  transition (own r) r (depth r) u (Got y) = Some t -> begins r (round t) <= read u -> holds_what_it_drew r t.
Proof.
  intros s r y u t Rb H M [P _] [k [la Eu]] E Rd. set (v := rank_of (base s) r) in *.
  assert (Lu : is_lost v = false).
  { unfold is_lost, is_ending. change (at_phase v) with (at_phase (draws k la v)). rewrite <- Eu. simpl in E. destruct y, (at_phase u); try discriminate; reflexivity. }
  destruct (a_live_rank_is_followed W own depth _ (own_ok W cfg deal ok) (base s) r Rb H Lu) as [z [Rz [_ [Er _]]]]. fold v in Er.
  pose proof (g_core _ _ _ _ _ (invariant_of W own depth _ (own_ok W cfg deal ok) z Rz) r H) as K. rewrite <- Er in K.
  assert (Q : in_place (begins r) (own r) t).
  { apply (what_is_held_stays_in_place_with_an_answer (begins r) (own r) r (depth r) u y t (configs_ok _ _ (own_ok W cfg deal ok) r H) (begin_of_rises _) (fun k gs t d => surplus r k gs t d H) (proj2 (join r H))).
    - subst u. exact (k_aligned _ _ _ _ _ _ K).
    - subst u. exact (k_plan _ _ _ _ _ _ K).
    - intros a m Ea Pa Ms. destruct (M a Ea) as [Ev Ma]. subst y. rewrite Ev in *. destruct (a_live_rank_is_answered W own depth _ (own_ok W cfg deal ok) (base s) r _ Rb H Lu Ma) as [x [I [Ex Mx]]].
      fold v in Ex. rewrite Ex in *. exact (proj2 (all_groups_are_agreed_on W own depth _ x r a (own_ok W cfg deal ok) (updating r H) I H Mx Pa m Ms)).
    - exact E.
    - subst u. destruct (P Lu). constructor; assumption. }
  split; [auto|]. split; [exact (in_place_laid _ _ _ (some_rounds r H) (begin_of_rises _) Q)|]. rewrite (nothing_is_read_of_an_answer _ _ _ _ _ _ E). exact Rd.
Qed.

Lemma what_is_drawn_is_in_place : forall s, shared_reachable s -> forall r, r < W -> holds_what_it_drew r (rank_of (base s) r).
Proof.
  intros s [k R]. induction R as [|k s l s' R IH St|k s i peer cause R IH Hi En]; intros r H.
  - assert (Z : steps_of (initial (own r) r) = [] /\ aligned (initial (own r) r) = [] /\ window (initial (own r) r) = []) by (repeat split). destruct Z as [Z1 [Z2 Z3]].
    cbn [shared_start base start rank_of].
    assert (P : in_place (begins r) (own r) (initial (own r) r)) by (constructor; unfold steps_in_place; rewrite ?Z1, ?Z2, ?Z3; [intros x []|split; [intros _; reflexivity|intros x []]|intros x []]).
    split; [auto|]. split; [exact (in_place_laid _ _ _ (some_rounds r H) (begin_of_rises _) P)|apply Nat.le_0_l].
  - assert (Sr : shared_reachable s) by (exists k; exact R). pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_first s Sr) as B.
    pose proof (a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_first s Sr) as Rb.
    assert (At : forall i, i < W -> read (rank_of (base s) i) + wanted (rank_of (base s) i) = begins i (S (round (rank_of (base s) i)))).
    { intros i Hi. rewrite (b_read _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B i Hi) (all_have_begun s i Sr Hi)). apply (places_by_rounds s i Sr Hi). }
    specialize (IH r H). set (v := rank_of (base s) r) in *. destruct St as [s i b Hi Bg mine far Be|s l b Ow St|s i cs ws b t Hi Bg To next mine far D St]; cbn [base].
    + rewrite (all_have_begun s i Sr Hi) in Bg. discriminate.
    + inversion St as [? i e t Hi M E|? x P Re|? i Hi Ru Tk|? i m la Hi D]; subst; [|exact IH|exact IH|destruct Ow]. cbn [rank_of].
      destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact IH]. fold v in E.
      destruct (answer_or_own e) as [[y ->]|NG].
      * apply (answer_holds s i y v t Rb Hi (fun a _ => conj eq_refl M) IH); [exists (wanted v), (ended v); symmetry; apply draws_none|exact E|]. destruct IH as [_ [_ Rd]]. replace (round t) with (round v); [exact Rd|]. simpl in E.
        destruct y as [a|cs|rs]; [|destruct Ow|]; destruct (at_phase v); try discriminate; [symmetry; exact (agree_round _ _ _ _ _ _ E)|].
        destruct (failure_of rs); [|discriminate]. injection E as <-. reflexivity.
      * apply (own_event_holds i (own i) (depth i) v e t Hi NG E IH). intros y Iy. destruct e as [xs en full| | | | | |]; try destruct Iy. simpl in Iy. destruct Ow as [Bg _].
        destruct (own_event _ _ _ _ _ _ NG E) as [[[Wn [Lx _]] _]|[_ X]]; [|discriminate]. destruct M as [Xs _]. fold v in Xs. rewrite Xs in Iy.
        apply (positions_of_a_part _ 0 (fun j z Ez => content_is_numbered order _ 0 j z Ez)) in Iy. pose proof (At i Hi) as A. fold v in A. destruct IH as [_ [_ Rd]]. split; [lia|]. intros _.
        assert (Cv : coming v = round v).
        { unfold coming, in_count. destruct (at_phase v) eqn:Pv; try lia. destruct (b_want _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B i Hi) Pv) as [Z _]. fold v in Z. contradiction. }
        rewrite Cv. lia.
    + inversion St as [? ? ? u H' M E| | |]; subst. cbn [rank_of]. destruct (Nat.eq_dec r i) as [->|NE].
      2:{ rewrite update_other by exact NE. unfold draws_its_share in D. destruct (_ || _); [subst b; exact IH|]. inversion D; subst. rewrite drawn_other by exact NE. exact IH. }
      rewrite update_same. destruct (count_reads _ _ _ _ _ _ E) as [_ [_ [Ru [_ [Ro _]]]]].
      assert (Shape : exists k la, rank_of b i = draws k la v).
      { unfold draws_its_share in D. destruct (_ || _); [subst b; exists (wanted v), (ended v); symmetry; apply draws_none|].
        inversion D; subst. exists (length mine), (far =? total). apply drawn_same. }
      destruct Shape as [k' [la Eb]].
      assert (Pv : at_phase v = COUNT) by (destruct (count_reads _ _ _ _ _ _ E) as [Pv _]; rewrite Eb in Pv; exact Pv).
      pose proof (At i Hi) as A. fold v in A. destruct (b_want _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B i Hi) Pv) as [Z _]. fold v in Z.
      apply (answer_holds s i (Counted cs) (rank_of b i) u Rb Hi ltac:(discriminate) IH); [eauto|exact E|]. rewrite Eb in Ro |- *. change (read (draws k' la v)) with (read v).
      rewrite Ro. change (round (draws k' la v)) with (round v). lia.
  - cbn [base rank_of]. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact (IH r H)]. destruct (IH i H) as [_ [[L1 L2] Rd]]. set (v := rank_of (base s) i) in *.
    pose proof (lose_lost peer cause v En) as L. pose proof (lost_steps _ _ L) as [Ls _]. split; [intros Z; rewrite (l_lost _ _ L) in Z; discriminate|]. split; [|rewrite (l_round _ _ L), (l_read _ _ L); exact Rd].
    constructor; unfold steps_in_place in *; rewrite ?Ls, ?(l_aligned _ _ L), ?(l_round _ _ L); [exact L1|]. intros y [[]|I]. apply L2. apply (Permutation_in y (l_window _ _ L)), in_app_iff in I. tauto.
Qed.

(** ** What an update trains on *)

(** The last round of update [u], and what rank [r] draws in that update. *)
Definition last_of (u : nat) : nat := u * p + (p - 1).
Definition part_of (u r : nat) : list nat := parts r (u * p) p.

Lemma rounds_of_an_update : forall r u, r < W -> has_steps (own r) (last_of u) = true /\ first_round (own r) (last_of u) = u * p /\ S (last_of u) = u * p + p.
Proof.
  intros r u H. change (has_steps (own r) (last_of u)) with (has_steps (cfg r) (last_of u)). change (first_round (own r) (last_of u)) with (first_round (cfg r) (last_of u)).
  rewrite (has_steps_in_rounds r _ H). unfold first_round, update_rounds, last_of. rewrite (in_rounds r H). replace (S (u * p + (p - 1))) with (S u * p) by (simpl; lia). rewrite Nat.mod_mul by lia.
  rewrite <- (Nat.div_unique (u * p + (p - 1)) p u (p - 1)) by lia. repeat split. simpl. lia.
Qed.

Lemma steps_are_of_updates : forall r k, r < W -> has_steps (own r) k = true -> exists u, k = last_of u.
Proof.
  intros r k H Hs. destruct (a_round_with_steps_is_the_last (own r) (some_rounds r H) k Hs) as [q E]. unfold update_rounds in E. change (c_updates (own r)) with (c_updates (cfg r)) in E.
  rewrite (in_rounds r H) in E. destruct q as [|q]; [simpl in E; lia|]. exists q. unfold last_of. simpl in E. lia.
Qed.

Lemma updates_begin_at_their_places : forall u, place (u * p) = first_of u /\ place (u * p + p) = first_of (S u).
Proof.
  assert (X : forall u, place (u * p) = first_of u).
  { intros u. destruct (an_update_is_drawn_in_its_rounds W n p total (some_rank _ _ ok) rounds (u * p)) as [_ [B _]]. rewrite Nat.div_mul in B by lia. apply B, Nat.mod_mul. lia. }
  intros u. split; [apply X|]. replace (u * p + p) with (S u * p) by (simpl; lia). apply X.
Qed.

(** The places of the common order that rank [r] trains on in update [u]. *)
Definition dealt_places (s : shared_sys) (u r : nat) : list nat := map (place_of s r) (samples_of (steps_in_round (last_of u) (rank_of (base s) r))).

(** The samples of update [u] among those that a rank has drawn are at the places of its part, in order. *)
Lemma samples_of_a_part : forall s r u, shared_reachable s -> r < W -> last_of u <= round (rank_of (base s) r) ->
  map (place_of s r) (filter (of_update (begins r) (own r) (last_of u)) (content (places s r))) = part_of u r.
Proof.
  intros s r u R H L. destruct (places_by_rounds s r R H) as [Ep _]. set (k := S (round (rank_of (base s) r))) in *. destruct (rounds_of_an_update r u H) as [_ [F1 F2]].
  assert (E : places s r = parts r 0 (u * p) ++ part_of u r ++ parts r (u * p + p) (k - (u * p + p))).
  { rewrite Ep. unfold part_of. replace k with (u * p + (p + (k - (u * p + p)))) at 1 by lia. rewrite !parts_app. rewrite Nat.add_0_l. reflexivity. }
  assert (La : length (parts r 0 (u * p)) = begins r (u * p)) by (rewrite parts_length; simpl begin_of at 2; simpl; lia).
  assert (Lb : length (part_of u r) = begins r (u * p + p) - begins r (u * p)) by apply parts_length.
  pose proof (begin_of_rises (fun k => length (part k (place k) r)) (u * p) (u * p + p) ltac:(lia)) as Ri.
  unfold Drawing.content. rewrite E, !content_from_app, !filter_app, !Nat.add_0_l.
  rewrite (filter_all _ _ false), (filter_all _ _ true), (filter_all _ _ false), app_nil_r; cbv iota.
  - unfold place_of. rewrite E. apply places_of_a_part.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_update_spec, F1, F2. lia.
  - intros y I. apply positions_of_content in I. apply of_update_spec. rewrite F1, F2. lia.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_update_spec, F1. lia.
Qed.

Lemma steps_are_early : forall s r x, shared_reachable s -> r < W -> In x (steps_of (rank_of (base s) r)) -> s_round x < round (rank_of (base s) r).
Proof.
  intros s r x R H Ix. pose proof (a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_first s R) as Rb.
  destruct (a_run_with_losses_follows_a_run_without W own depth _ (own_ok W cfg deal ok) (base s) Rb) as [v [Rv F]]. destruct (follows_frame W _ v r F H) as [E [_ [Er _]]].
  rewrite E in Ix. rewrite Er. exact (steps_are_of_earlier_rounds W own depth _ (own_ok W cfg deal ok) v r x Rv H Ix).
Qed.

Theorem an_update_holds_only_what_its_rank_draws_of_it : forall s r x y, shared_reachable s -> r < W -> In x (steps_of (rank_of (base s) r)) -> In y (s_group x) ->
  exists u, s_round x = last_of u /\ In (place_of s r y) (part_of u r).
Proof.
  intros s r x y R H Ix Iy. destruct (what_is_drawn_is_in_place s R r H) as [_ [[P1 _] _]]. destruct (P1 x Ix) as [Hs B]. specialize (B y Iy).
  destruct (steps_are_of_updates r _ H Hs) as [u E]. exists u. split; [exact E|]. rewrite E in B.
  pose proof (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_first s r R H) as Nl. cbv zeta in Nl.
  assert (I : In y (content (places s r))) by (apply (Permutation_in y Nl), in_or_app; left; apply in_concat; exists (s_group x); split; [apply in_map, Ix|exact Iy]).
  rewrite <- (samples_of_a_part s r u R H); [|pose proof (steps_are_early s r x R H Ix); lia]. apply in_map, filter_In. split; [exact I|]. apply of_update_spec, B.
Qed.

Theorem a_rank_past_an_update_trains_on_what_it_drew_of_it : forall s r u, shared_reachable s -> r < W -> is_past (last_of u) (rank_of (base s) r) ->
  Permutation (dealt_places s u r) (part_of u r).
Proof.
  intros s r u R H Pa. set (v := rank_of (base s) r) in *. destruct (what_is_drawn_is_in_place s R r H) as [_ [Pl Rd]]. fold v in Pl, Rd.
  destruct (rounds_of_an_update r u H) as [Hs [F1 F2]]. pose proof (some_rounds r H) as Up. destruct (places_by_rounds s r R H) as [_ [_ Lp]]. fold v in Lp.
  pose proof (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_first s r R H) as Nl. cbv zeta in Nl. fold v in Nl.
  assert (All : has_done (begins r) (content (places s r)) (last_of u) v /\ (last_of u <= round v \/ Permutation (samples_of (steps_of v)) (content (places s r)) /\ total = place (S (round v)))).
  { destruct Pa as [L|[En Co]].
    - split; [left; split; [exact L|]|left; lia]. split; [exact Nl|right]. exact (Nat.le_trans _ _ _ (begin_of_rises _ _ _ L) Rd).
    - destruct (join 0 (some_rank _ _ ok)) as [J1 J2].
      destruct (a_complete_rank_has_planned_what_it_has_drawn W total cfg depth order deal wish ok deal_next deal_first s r R H J1 J2 En Co) as [D [_ Pm]]. fold v in Pm.
      split; [right; exact Pm|]. right. split; [exact Pm|].
      destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_first s r R H (all_have_begun s r R H)) as [_ [_ Lr]].
      rewrite drawn_in_rounds, Lr in D. symmetry. exact D. }
  destruct All as [Pm C]. unfold dealt_places. fold v.
  rewrite (what_a_rank_past_a_round_holds_of_it (begins r) (own r) (content (places s r)) v (last_of u) Up Hs (begin_of_rises _) (fun i x => content_is_numbered order _ 0 i x) Pl Pm).
  destruct (Nat.le_gt_cases (last_of u) (round v)) as [L|L]; [rewrite (samples_of_a_part s r u R H L); reflexivity|]. destruct C as [C|[C T]]; [lia|].
  (* The rank has ended before this update, so it has drawn nothing of it. *)
  assert (Few : length (places s r) <= begins r (u * p)).
  { apply Nat.nlt_ge. intros O. destruct (nth_error (content (places s r)) (begins r (u * p))) as [y|] eqn:Ey.
    2:{ apply nth_error_None in Ey. rewrite content_length in Ey. lia. }
    pose proof (content_is_numbered order _ 0 _ y Ey) as Py. simpl in Py.
    assert (Iy : In y (samples_of (steps_of v))) by (apply (Permutation_in y (Permutation_sym C)), (nth_error_In _ _ Ey)).
    apply in_concat in Iy as [g [Ig Iy]]. apply in_map_iff in Ig as [x [<- Ix]]. destruct Pl as [P1 _]. destruct (P1 x Ix) as [Hx B]. specialize (B y Iy).
    pose proof (begin_of_rises (fun k => length (part k (place k) r)) _ _ (a_later_update_begins_later (own r) Up (s_round x) (last_of u) Hx ltac:(pose proof (steps_are_early s r x R H Ix); unfold v in L; lia))) as Z.
    rewrite F1 in Z. lia. }
  assert (None : part_of u r = []).
  { apply length_zero_iff_nil. unfold part_of. rewrite parts_length. enough (begins r (u * p + p) <= begins r (S (round v))) by lia. rewrite <- F2.
    destruct (Nat.le_gt_cases (S (last_of u)) (S (round v))) as [M|M]; [apply begin_of_rises, M|].
    remember (S (round v)) as q. replace (S (last_of u)) with (q + (S (last_of u) - q)) by lia. generalize (S (last_of u) - q). intros m.
    induction m as [|m IH]; [rewrite Nat.add_0_r; apply le_n|].
    rewrite Nat.add_succ_r. cbn [begin_of]. enough (length (part (q + m) (place (q + m)) r) = 0) by lia.
    pose proof (share_within W deal (q + m) (fun _ => 0) (place (q + m)) r H) as Sh. rewrite dealt_out_size in Sh. unfold deal in Sh.
    destruct (portions_by_load_are_the_next_places W n p total (some_rank _ _ ok) rounds loads one_each (q + m) (place (q + m))) as [_ Le].
    pose proof (place_rises q m). lia. }
  rewrite None, (filter_all _ _ false); [reflexivity|]. intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_update_spec, F1. lia.
Qed.

Theorem a_dealt_update_holds_exactly_what_lies_at_its_places : forall s u, shared_reachable s -> (forall r, r < W -> is_past (last_of u) (rank_of (base s) r)) ->
  Permutation (concat (map (dealt_places s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n)).
Proof.
  intros s u R Pa. transitivity (concat (map (part_of u) (ranks W))).
  - apply each_gives. intros r Hr. exact (a_rank_past_an_update_trains_on_what_it_drew_of_it s r u R Hr (Pa r Hr)).
  - unfold part_of. rewrite (parts_are_the_next_places (u * p) p). destruct (updates_begin_at_their_places u) as [-> ->]. unfold Shards.first_of.
    destruct (Nat.le_gt_cases total (u * n)) as [O|O]; [|rewrite (Nat.min_r total (u * n)) by lia; reflexivity].
    rewrite (Nat.min_l _ _ O). replace (Nat.min total (S u * n) - total) with 0 by lia. replace (Nat.min total (S u * n) - u * n) with 0 by lia. reflexivity.
Qed.

Theorem a_rank_has_drawn_some_of_an_update : W <= n -> p = 2 \/ 3 * W <= n -> feeds W total cfg depth order deal wish.
Proof.
  intros Hn C s r ws R H Bg u next Ph En To Hs. pose proof (some_rounds r H) as Up. destruct (steps_are_of_updates r next H Hs) as [q E].
  destruct (places_by_rounds s r R H) as [_ [Eu Lp]]. fold u next in Eu, Lp. destruct (updates_begin_at_their_places q) as [_ Eq]. destruct (rounds_of_an_update r q H) as [_ [_ F2]]. rewrite <- E in F2.
  destruct (Nat.le_gt_cases total (S q * n)) as [O|O]; [right|left].
  { unfold far_of. rewrite dealt_out_size, Eu. change (place (S next) = total). rewrite F2, Eq. unfold Shards.first_of. apply Nat.min_l, O. }
  destruct (a_first_portion_by_load_feeds_every_rank W n p total (some_rank _ _ ok) rounds loads one_each (q * p) r Hn C (Nat.mod_mul q p ltac:(lia)) H) as [D|D]; [|rewrite Nat.div_mul in D by lia; lia].
  destruct (Nat.eq_dec next (S (q * p))) as [Nx|Nx].
  { unfold share_of, deal. rewrite Eu, Nx. lia. }
  enough (window u <> []) by (destruct (window u); [contradiction|simpl; lia]).
  assert (Ln : S (S (q * p)) <= next) by (unfold last_of in E; lia).
  pose proof (begin_of_rises (fun k => length (part k (place k) r)) _ _ Ln) as Ri. cbn [begin_of] in Ri.
  assert (Live : is_lost u = false) by (unfold is_lost, is_ending; rewrite Ph; reflexivity).
  destruct (what_is_drawn_is_in_place s R r H) as [P _]. destruct (P Live) as [P1 [P2 _] _]. fold u in P1, P2.
  assert (Au : aligned u = []).
  { apply P2. change (has_steps (cfg r) (round u) = false). rewrite (has_steps_in_rounds r _ H). fold next. apply Nat.eqb_neq. rewrite E. unfold last_of.
    rewrite Nat.add_comm, Nat.mod_add, Nat.mod_small by lia. lia. }
  pose proof (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_first s r R H) as Nl. cbv zeta in Nl. fold u in Nl.
  pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_first s R) as B. pose proof (b_rank _ _ _ _ _ _ B r H) as Bk.
  destruct (b_want _ _ _ _ _ _ _ Bk Ph) as [Wz _]. pose proof (b_read _ _ _ _ _ _ _ Bk Bg) as Rd. fold u in Wz, Rd. rewrite Wz, Nat.add_0_r in Rd.
  rewrite Au, Rd, <- (content_length order (places s r)), skipn_all, app_nil_r in Nl. simpl in Nl.
  destruct (nth_error (content (places s r)) (begins r (q * p))) as [y|] eqn:Ey; [|apply nth_error_None in Ey; rewrite content_length in Ey; simpl in *; lia].
  pose proof (content_is_numbered order _ 0 _ y Ey) as Py. simpl in Py.
  pose proof (Permutation_in y (Permutation_sym Nl) (nth_error_In _ _ Ey)) as Iy. apply in_app_iff in Iy as [Iy|Iy]; [exfalso|intros Z; rewrite Z in Iy; destruct Iy].
  apply in_concat in Iy as [g [Ig Iy]]. apply in_map_iff in Ig as [x [<- Ix]]. destruct (P1 x Ix) as [Hx Bx]. specialize (Bx y Iy).
  pose proof (a_later_update_begins_later (own r) Up (s_round x) next Hx ltac:(pose proof (steps_are_early s r x R H Ix); unfold next, u; lia)) as Z. rewrite E, (proj1 (proj2 (rounds_of_an_update r q H))) in Z.
  pose proof (begin_of_rises (fun k => length (part k (place k) r)) _ _ Z). lia.
Qed.

End Dealt.
