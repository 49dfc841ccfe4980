(** UPDATE if ranks share an order (R16.4): each update is dealt out, in any parts. So a rank draws its part of update [u] for round [u],
    and trains on it in that round. Spec: R14, R16. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Rules Alignment Layouts Runs Machine Local Rank System Facts Keeps Protocol Age Rounds Instance Loss Shards Drawing Job Updates.
Import ListNotations.

Section Dealt.
Variables (W total n : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample).
(** [part d r] is what rank [r] draws when [d] places are drawn. Together the parts are the places of an update, or all that are left. Only
    in the last update may a rank have none. *)
Variables (part : nat -> nat -> list nat) (wish : nat -> nat -> nat -> list sample -> list sample -> nat).
Hypothesis ok : setting_ok W cfg.
Hypothesis part_next : forall d, Permutation (concat (map (part d) (ranks W))) (seq d (Nat.min n (total - d))).
Hypothesis part_some : forall d r, r < W -> 1 <= length (part d r) \/ total <= d + n.
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].
Hypothesis emits_all : forall r a, r < W -> o_groups_max a <= c_rule (cfg r) a.

Definition deal : (nat -> nat) -> nat -> nat -> list nat := fun _ => part.
Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation content := (content order).
Notation drawn := (Shards.drawn W deal).
Notation drawn_by := (Shards.drawn_by W deal).
Notation own := (shared_config cfg deal).

Lemma dealt_out_size : forall ws d, length (dealt_out W deal ws d) = Nat.min n (total - d).
Proof. intros ws d. unfold dealt_out, deal. rewrite (Permutation_length (part_next d)), seq_length. reflexivity. Qed.

Lemma deal_next : forall ws d, exists m, m <= total - d /\ Permutation (dealt_out W deal ws d) (seq d m).
Proof. intros ws d. exists (Nat.min n (total - d)). split; [lia|exact (part_next d)]. Qed.

Lemma deal_feeds : forall ws d r, r < W -> 1 <= ws r -> 1 <= length (deal ws d r) \/ total <= d + length (dealt_out W deal ws d).
Proof. intros ws d r H _. rewrite dealt_out_size. destruct (part_some d r H) as [L|L]; [left; exact L|right; lia]. Qed.

(** The place at which update [u] begins, the part of it that a rank draws, and where that part begins in what the rank has drawn. *)
Definition first_of (u : nat) : nat := Nat.min total (u * n).
Definition part_of (u r : nat) : list nat := part (first_of u) r.
Notation begins r := (begin_of (fun u => length (part_of u r))).

Lemma drawn_in_updates : forall rounds, drawn rounds = first_of (length rounds).
Proof. induction rounds as [|ws before IH]; cbn [Shards.drawn length]; [unfold first_of; simpl; lia|]. rewrite IH, dealt_out_size. unfold first_of. simpl. lia. Qed.

Lemma drawn_length : forall r rounds, length (drawn_by r rounds) = begins r (length rounds).
Proof. intros r. induction rounds as [|ws before IH]; cbn [Shards.drawn_by length begin_of]; [reflexivity|]. rewrite app_length, IH, drawn_in_updates. reflexivity. Qed.

Lemma parts_follow_each_other : forall r rounds u, u < length rounds ->
  exists a c, drawn_by r rounds = a ++ part_of u r ++ c /\ length a = begins r u.
Proof.
  intros r. induction rounds as [|ws before IH]; intros u L; cbn [Shards.drawn_by length] in *; [lia|]. destruct (Nat.eq_dec u (length before)) as [->|Nu].
  - exists (drawn_by r before), []. rewrite drawn_in_updates, app_nil_r. split; [reflexivity|apply drawn_length].
  - destruct (IH u ltac:(lia)) as [a [c [-> La]]]. exists a. eexists. split; [rewrite <- !app_assoc; reflexivity|exact La].
Qed.

Lemma content_is_numbered : forall l q i x, nth_error (content_from order q l) i = Some x -> pos x = q + i.
Proof. induction l as [|p l IH]; intros q [|i] x E; simpl in E; try discriminate; [injection E as <-; simpl; lia|]. apply IH in E. lia. Qed.

Lemma positions_of_content : forall l q y, In y (content_from order q l) -> q <= pos y < q + length l.
Proof.
  intros l q y I. apply In_nth_error in I as [i E]. rewrite (content_is_numbered l q i y E), <- (content_from_length order l q). assert (i < length (content_from order q l)) by (apply nth_error_Some; congruence). lia.
Qed.

(** ** A rank holds what it has drawn in the round for which it drew it *)

Definition holds_what_it_drew (r : nat) (u : state) : Prop := (is_lost u = false -> in_place (begins r) u) /\ laid (begins r) u /\ begins r (round u) <= read u.

Lemma drawing_leaves_what_is_held : forall r u k la, holds_what_it_drew r u -> holds_what_it_drew r (draws k la u).
Proof. intros r u k la [P [[L1 L2] Rd]]. split; [intros L; destruct (P L); constructor; assumption|]. split; [constructor; assumption|exact Rd]. Qed.

(** What a rank reads lies after the rounds that are over, and before the end of what it has drawn. *)
Lemma own_event_holds : forall r c d u e t, (forall y, e <> Got y) -> transition c r d u e = Some t -> holds_what_it_drew r u ->
  (forall y, In y (reads e) -> begins r (round u) <= pos y /\ (is_lost u = false -> begins r (coming u) <= pos y < begins r (S (coming u)))) -> holds_what_it_drew r t.
Proof.
  intros r c d u e t NG E [P [[L1 L2] Rd]] Re. pose proof (own_event_leaves_lost _ _ _ _ _ _ NG E) as El. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm.
  pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. unfold aged in Ag. injection Ag as _ Ar Aw Ao. split; [|split].
  - intros L. rewrite El in L. exact (proj1 (what_is_held_stays_in_place (begins r) c r d u e t NG E (P L) (fun y I => proj2 (Re y I) L))).
  - constructor; rewrite ?(sa_steps _ _ Sm), ?(sa_aligned _ _ Sm), ?Ao, ?Aw; [exact L1|]. intros y [I|I]; [auto|]. apply in_app_iff in I as [I|I]; [auto|apply (Re y I)].
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
  assert (Q : in_place (begins r) t).
  { apply (what_is_held_stays_in_place_with_an_answer (begins r) (own r) r (depth r) u y t (configs_ok _ _ (own_ok W cfg deal ok) r H) (fun k gs t d => surplus r k gs t d H) (proj2 (join r H))).
    - subst u. exact (k_aligned _ _ _ _ _ _ K).
    - subst u. exact (k_plan _ _ _ _ _ _ K).
    - intros a Ea Pa Ms. destruct (M a Ea) as [Ev Ma]. subst y. rewrite Ev in *. destruct (a_live_rank_is_answered W own depth _ (own_ok W cfg deal ok) (base s) r _ Rb H Lu Ma) as [x [I [Ex Mx]]].
      fold v in Ex. rewrite Ex in *. exact (proj2 (all_groups_are_agreed_on W own depth _ x r a (own_ok W cfg deal ok) (proj1 (join r H)) (emits_all r a H) I H Mx Pa Ms)).
    - exact E.
    - subst u. destruct (P Lu). constructor; assumption. }
  split; [auto|]. split; [exact (in_place_laid _ _ (begin_of_rises _) Q)|]. rewrite (nothing_is_read_of_an_answer _ _ _ _ _ _ E). exact Rd.
Qed.

Lemma what_is_drawn_is_in_place : forall s, shared_reachable s -> forall r, r < W -> holds_what_it_drew r (rank_of (base s) r).
Proof.
  intros s [k R]. induction R as [|k s l s' R IH St|k s i peer cause R IH Hi En]; intros r H.
  - split; [|split; [|apply Nat.le_0_l]]; [intros _|]; constructor; unfold coming, in_count; simpl; try easy; intros y [[]|[]].
  - assert (Sr : shared_reachable s) by (exists k; exact R). pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_feeds s Sr) as B.
    pose proof (a_run_of_shared_shards_is_one_of_shards_of_ones_own W total cfg depth order deal wish ok deal_next deal_feeds s Sr) as Rb.
    assert (At : forall i, i < W -> begun s i = true -> read (rank_of (base s) i) + wanted (rank_of (base s) i) = begins i (S (round (rank_of (base s) i)))).
    { intros i Hi Bg. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds s i Sr Hi Bg) as [Ep [_ L]].
      rewrite (b_read _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B i Hi) Bg), Ep, drawn_length, L. reflexivity. }
    specialize (IH r H). set (v := rank_of (base s) r) in *. destruct St as [s i b Hi Bg mine far Be|s l b Ow St|s i cs ws b t Hi Bg To mine far D St]; cbn [base].
    + unfold Drawing.begins in Be. destruct (far =? total); [|subst b; exact IH]. destruct mine as [|p mine']; inversion Be as [? ? ? t H' M E| | |? ? ? ? H' D]; subst.
      * cbn [rank_of]. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact IH].
        apply (own_event_holds i (own i) (depth i) v (SamplesRead [] true false) t); [discriminate|exact E|exact IH|intros y []].
      * destruct (Nat.eq_dec r i) as [->|NE]; [rewrite drawn_same; apply drawing_leaves_what_is_held, IH|rewrite drawn_other by exact NE; exact IH].
    + inversion St as [? i e t Hi M E|? x P Re|? i Hi Ru Tk|? i m la Hi D]; subst; [|exact IH|exact IH|destruct Ow]. cbn [rank_of].
      destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact IH]. fold v in E.
      destruct (answer_or_own e) as [[y ->]|NG].
      * apply (answer_holds s i y v t Rb Hi (fun a _ => conj eq_refl M) IH); [exists (wanted v), (ended v); symmetry; apply draws_none|exact E|]. destruct IH as [_ [_ Rd]]. replace (round t) with (round v); [exact Rd|]. simpl in E.
        destruct y as [a|cs|rs]; [|destruct Ow|]; destruct (at_phase v); try discriminate; [symmetry; exact (agree_round _ _ _ _ _ _ E)|].
        destruct (failure_of rs); [|discriminate]. injection E as <-. reflexivity.
      * apply (own_event_holds i (own i) (depth i) v e t NG E IH). intros y Iy. destruct e as [xs en full| | | | | |]; try destruct Iy. simpl in Iy. destruct Ow as [Bg _].
        destruct (own_event _ _ _ _ _ _ NG E) as [[[Wn [Lx _]] _]|[_ X]]; [|discriminate]. destruct M as [Xs _]. fold v in Xs. rewrite Xs in Iy.
        apply (positions_of_a_part _ 0 (fun j z Ez => content_is_numbered _ 0 j z Ez)) in Iy. pose proof (At i Hi Bg) as A. fold v in A. destruct IH as [_ [_ Rd]]. split; [lia|]. intros _.
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
      pose proof (At i Hi Bg) as A. fold v in A. destruct (b_want _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ B i Hi) Pv) as [Z _]. fold v in Z.
      apply (answer_holds s i (Counted cs) (rank_of b i) u Rb Hi ltac:(discriminate) IH); [eauto|exact E|]. rewrite Eb in Ro |- *. change (read (draws k' la v)) with (read v).
      rewrite Ro. change (round (draws k' la v)) with (round v). lia.
  - cbn [base rank_of]. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same|rewrite update_other by exact NE; exact (IH r H)]. destruct (IH i H) as [_ [[L1 L2] Rd]]. set (v := rank_of (base s) i) in *.
    pose proof (lose_lost peer cause v En) as L. pose proof (lost_steps _ _ L) as [Ls _]. split; [intros Z; rewrite (l_lost _ _ L) in Z; discriminate|]. split; [|rewrite (l_round _ _ L), (l_read _ _ L); exact Rd].
    constructor; rewrite ?Ls, ?(l_aligned _ _ L), ?(l_round _ _ L); [exact L1|]. intros y [[]|I]. apply L2. apply (Permutation_in y (l_window _ _ L)), in_app_iff in I. tauto.
Qed.

(** ** What an update trains on *)

(** The places of the common order that rank [r] trains on in update [u]. *)
Definition dealt_places (s : shared_sys) (u r : nat) : list nat := map (place_of s r) (samples_of (steps_in_round u (rank_of (base s) r))).

(** The samples of update [u] among those that a rank has drawn are at the places of its part, in order. *)
Lemma samples_of_a_part : forall s r u, shared_reachable s -> r < W -> begun s r = true -> u <= round (rank_of (base s) r) ->
  map (place_of s r) (filter (of_round (begins r) u) (content (places s r))) = part_of u r.
Proof.
  intros s r u R H Bg L. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds s r R H Bg) as [Ep [_ Lr]].
  destruct (parts_follow_each_other r (rounds_of cfg s r) u ltac:(lia)) as [a [c [E La]]]. rewrite E in Ep.
  unfold Drawing.content. rewrite Ep, !content_from_app, !filter_app, !Nat.add_0_l.
  rewrite (filter_all _ _ false), (filter_all _ _ true), (filter_all _ _ false), app_nil_r; cbv iota.
  - unfold place_of. rewrite Ep. apply places_of_a_part.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_round_spec. simpl. lia.
  - intros y I. apply positions_of_content in I. apply of_round_spec. simpl. lia.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_round_spec. lia.
Qed.

(** UPDATE: at every moment a step of round [u] holds only samples of the part of update [u] that its rank draws. *)
Theorem an_update_holds_only_what_its_rank_draws_of_it : forall s r x y, shared_reachable s -> r < W -> In x (steps_of (rank_of (base s) r)) -> In y (s_group x) ->
  In (place_of s r y) (part_of (s_round x) r).
Proof.
  intros s r x y R H Ix Iy. destruct (what_is_drawn_is_in_place s R r H) as [_ [[P1 _] _]].
  pose proof (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_feeds s r R H) as Nl. cbv zeta in Nl.
  assert (I : In y (content (places s r))) by (apply (Permutation_in y Nl), in_or_app; left; apply in_concat; exists (s_group x); split; [apply in_map, Ix|exact Iy]).
  pose proof (P1 x Ix y Iy) as B. destruct (begun s r) eqn:Bg.
  - assert (L : s_round x <= round (rank_of (base s) r)).
    { apply positions_of_content in I. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds s r R H Bg) as [Ep [_ Lr]].
      rewrite Ep, drawn_length, Lr in I. apply Nat.nlt_ge. intros O. pose proof (begin_of_rises (fun u => length (part_of u r)) _ _ O). lia. }
    rewrite <- (samples_of_a_part s r _ R H Bg L). apply in_map, filter_In. split; [exact I|]. apply of_round_spec, B.
  - pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_feeds s R) as Bk.
    destruct (b_fresh _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ Bk r H) Bg) as [_ [_ [Z _]]]. rewrite Z in I. destruct I.
Qed.

(** UPDATE, COVER, ONCE: once a rank is past update [u], it has planned each place of its part once. *)
Theorem a_rank_past_an_update_trains_on_what_it_drew_of_it : forall s r u, shared_reachable s -> r < W -> is_past u (rank_of (base s) r) ->
  Permutation (dealt_places s u r) (part_of u r).
Proof.
  intros s r u R H Pa. set (v := rank_of (base s) r) in *. destruct (what_is_drawn_is_in_place s R r H) as [_ [Pl Rd]]. fold v in Pl, Rd.
  assert (All : has_done (begins r) (content (places s r)) u v /\ begun s r = true /\ (u <= round v \/ total <= first_of u)).
  { destruct Pa as [L|[En Co]].
    - split; [left; split; [exact L|]|split; [|left; lia]].
      + split; [exact (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_feeds s r R H)|right].
        exact (Nat.le_trans _ _ _ (begin_of_rises _ _ _ L) Rd).
      + pose proof (shared_books W total cfg depth order deal wish ok deal_next deal_feeds s R) as Bk. destruct (begun s r) eqn:Bg; [reflexivity|exfalso].
        destruct (b_fresh _ _ _ _ _ _ _ (b_rank _ _ _ _ _ _ Bk r H) Bg) as [Z _]. unfold v in L. destruct Z as [Z|[p [c Z]]]; rewrite Z in L; simpl in L; lia.
    - destruct (join 0 (some_rank _ _ ok)) as [J1 J2].
      destruct (a_complete_rank_has_planned_what_it_has_drawn W total cfg depth order deal wish ok deal_next deal_feeds s r R H J1 J2 En Co) as [D [Bg Pm]]. fold v in Pm.
      split; [right; exact Pm|]. split; [exact Bg|]. destruct (Nat.le_gt_cases u (round v)) as [L|L]; [left; exact L|right].
      destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds s r R H Bg) as [_ [_ Lr]].
      rewrite drawn_in_updates, Lr in D. fold v in D. unfold first_of in *. assert (S (round v) * n <= u * n) by (apply Nat.mul_le_mono_r; lia). lia. }
  destruct All as [Pm [Bg C]]. unfold dealt_places. fold v.
  rewrite (what_a_rank_past_a_round_holds_of_it (begins r) (content (places s r)) v u (begin_of_rises _) (fun i x => content_is_numbered _ 0 i x) Pl Pm).
  destruct (Nat.le_gt_cases u (round v)) as [L|L]; [rewrite (samples_of_a_part s r u R H Bg L); reflexivity|]. destruct C as [C|C]; [lia|].
  assert (Z : length (part_of u r) = 0) by (pose proof (share_within W deal (fun _ => 0) (first_of u) r H) as S; rewrite dealt_out_size in S; unfold part_of; unfold deal in S; lia).
  rewrite (filter_all _ _ false); [apply length_zero_iff_nil in Z; rewrite Z; reflexivity|]. intros y _. apply not_true_is_false. rewrite of_round_spec. simpl. lia.
Qed.

(** Once all ranks are past update [u], together they have planned each place from u n up to (u + 1) n, as far as the order goes, once. *)
Theorem a_dealt_update_holds_exactly_what_lies_at_its_places : forall s u, shared_reachable s -> (forall r, r < W -> is_past u (rank_of (base s) r)) ->
  Permutation (concat (map (dealt_places s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n)).
Proof.
  intros s u R Pa. transitivity (concat (map (part (first_of u)) (ranks W))).
  - apply each_gives. intros r Hr. exact (a_rank_past_an_update_trains_on_what_it_drew_of_it s r u R Hr (Pa r Hr)).
  - rewrite (part_next (first_of u)). unfold first_of. destruct (Nat.le_gt_cases total (u * n)) as [O|O].
    + rewrite (Nat.min_l _ _ O). replace (Nat.min n (total - total)) with 0 by lia. replace (Nat.min total (S u * n) - u * n) with 0 by lia. reflexivity.
    + rewrite (Nat.min_r total (u * n)) by lia. replace (Nat.min n (total - u * n)) with (Nat.min total (S u * n) - u * n) by (simpl; lia). reflexivity.
Qed.

End Dealt.
