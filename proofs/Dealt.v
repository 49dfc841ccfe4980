(** UPDATE where ranks share an order (R16.4): each update is dealt out, in whatever parts; so a rank draws its part of update [u] for
    round [u], and trains on it in that round. Spec: R14, R16. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Rules Alignment Layouts Runs Machine Local Rank System Facts Keeps Protocol Age Rounds Instance Shards Drawing Job Updates.
Import ListNotations.

Section Dealt.
Variables (W total n : nat).
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable order : nat -> sample.
(** What each rank draws where so many places are drawn: together the places of an update, or all that are left. Only of the last may a
    rank have none. *)
Variable part : nat -> nat -> list nat.
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis part_next : forall d, Permutation (concat (map (part d) (ranks W))) (seq d (Nat.min n (total - d))).
Hypothesis part_some : forall d r, r < W -> 1 <= length (part d r) \/ total <= d + n.
Hypothesis wish_some : forall r k d w, r < W -> 1 <= wish r k d w [].
Hypothesis join : forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
Hypothesis surplus : forall r k gs t d, r < W -> length gs <= t -> snd (c_align (cfg r) k gs t d) = [].
Hypothesis emits_all : forall r a, r < W -> o_groups_max a <= c_rule (cfg r) a.

Definition deal : (nat -> nat) -> nat -> nat -> list nat := fun _ => part.
Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation content := (content order).
Notation drawn := (drawn W deal).
Notation drawn_by := (drawn_by W deal).

Lemma dealt_out_size : forall ws d, length (dealt_out W deal ws d) = Nat.min n (total - d).
Proof. intros ws d. unfold dealt_out, deal. rewrite (Permutation_length (part_next d)), seq_length. reflexivity. Qed.

Lemma deal_next : forall ws d, exists m, m <= total - d /\ Permutation (dealt_out W deal ws d) (seq d m).
Proof. intros ws d. exists (Nat.min n (total - d)). split; [lia|exact (part_next d)]. Qed.

Lemma deal_feeds : forall ws d r, r < W -> 1 <= ws r -> 1 <= length (deal ws d r) \/ total <= d + length (dealt_out W deal ws d).
Proof. intros ws d r H _. rewrite dealt_out_size. destruct (part_some d r H) as [L|L]; [left; exact L|right; lia]. Qed.

(** The place at which update [u] begins, the part of it that a rank draws, and where that begins in what the rank has drawn. *)
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

(** ** What is drawn is held in its round *)

Lemma what_is_drawn_is_in_place : forall s, shared_reachable s -> forall r, r < W -> let u := rank_of (base s) r in
  in_place (begins r) u /\ begins r (round u) <= read u.
Proof.
  induction 1 as [|s s' R IH St]; intros r H.
  { split; [constructor; unfold coming, in_count; simpl; easy|simpl; lia]. }
  destruct (shared_runs W total cfg depth order deal wish ok deal_next deal_feeds wish_some s R) as [B F]. destruct (F _ (content_of_places W order s)) as [t [Rt Fo]]. clear F.
  pose proof (invariant_of W _ depth _ (own_ok W cfg ok _) t Rt) as I.
  assert (At : forall i, i < W -> begun s i = true -> length (places s i) = begins i (S (round (rank_of (base s) i)))).
  { intros i Hi Bg. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds wish_some s i R Hi Bg) as [-> [_ L]].
    rewrite drawn_length, L. reflexivity. }
  assert (Keep : forall i u x, i < W -> (i = r -> in_place (begins i) u /\ begins i (round u) <= read u) ->
    let v := rank_of (with_rank (base s) i u x) r in in_place (begins r) v /\ begins r (round v) <= read v).
  { intros i u x Hi Ch. cbn [with_rank rank_of]. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same; auto|rewrite update_other by exact NE; exact (IH r H)]. }
  destruct St as [s i u Hi Bg mine far Eu|s i e u Hi Bg M E|s i cs ws u Hi Bg M To mine far E|s x P Re|s i Hi Ru Tk]; cbn [base]; try exact (IH r H);
  (apply Keep; [exact Hi|intros ->]); destruct (IH r H) as [P Rd]; set (v := rank_of (base s) r) in *.
  - destruct (post_in_place (begins r) (cfg r) r (draws (length mine) (far =? total) v)) as [Q _]; [destruct P; constructor; assumption|]. rewrite Eu. split; [exact Q|].
    destruct (b_fresh _ _ _ _ _ _ (b_rank _ _ _ _ _ B r H) Bg) as [Fr _]. unfold v. rewrite Fr. simpl. lia.
  - destruct (rank_step_followed W total cfg depth order deal ok _ s t r e u Rt Fo (content_of_places W order s) B H Bg M E) as [_ [_ [_ [Er _]]]]. fold v in Er.
    destruct (a_rank _ _ _ _ Fo r H) as [w [en [m [Nr [_ T]]]]]. unfold at_rank in T. rewrite Bg in T. fold v in T, Nr. pose proof (g_core _ _ _ _ _ I r H) as K. rewrite Nr in K.
    assert (Own : (forall y, e <> Got y) -> (forall xs en full, e <> SamplesRead xs en full) -> transition (cfg r) r (depth r) v e = Some u ->
      in_place (begins r) u /\ begins r (round u) <= read u).
    { intros NG NR Tr. destruct (what_is_held_stays_in_place (begins r) (cfg r) r (depth r) v e u NG Tr P) as [Q _]; [destruct e; try (intros x []); exfalso; eapply NR; reflexivity|].
      split; [exact Q|]. rewrite Er. exact (Nat.le_trans _ _ _ Rd (read_grows _ _ _ _ _ _ Tr)). }
    assert (Answer : forall y u0, transition (cfg r) r (depth r) v (Got y) = Some u0 -> (forall a, y = Agreed a -> at_phase v = OFFER -> makes_steps (cfg r) a ->
      groups v = c_group (cfg r) (budget v) (window v) /\ length (groups v) <= target (cfg r) a) -> in_place (begins r) u0).
    { intros y u0 Tr En. apply (what_is_held_stays_in_place_with_an_answer (begins r) (cfg r) r (depth r) v y u0 (configs_ok _ _ ok r H)
        (fun k gs t d => surplus r k gs t d H) (proj2 (join r H)) (k_aligned _ _ _ _ _ _ K) (k_plan _ _ _ _ _ _ K) En Tr P). }
    destruct e as [xs ? ?| |[a|cs|rs]| | | |]; try (apply Own; [discriminate|discriminate|exact E]); simpl in E.
    + destruct (wanted v =? 0) eqn:Z; [discriminate|]. destruct (wanted v <? length xs) eqn:L; [discriminate|]. destruct (is_nil xs); [discriminate|]. injection E as <-. apply Nat.eqb_neq in Z. apply Nat.ltb_ge in L.
      assert (Nc : at_phase v <> COUNT) by (intros Pv; unfold tied in T; rewrite Pv in T; destruct T; contradiction).
      pose proof (b_read _ _ _ _ _ _ (b_rank _ _ _ _ _ B r H) Bg) as Br. rewrite (At r H Bg) in Br. fold v in Br.
      match goal with |- in_place _ (post ?c ?r ?w) /\ _ => destruct (post_in_place (begins r) c r w) as [Q _] end; [|split; [exact Q|simpl; lia]].
      destruct P as [P1 P2 P3]. constructor; [exact P1|exact P2|]. change (coming _) with (coming v). cbn [window]. intros x Ix. apply in_app_iff in Ix as [Ix|Ix]; [exact (P3 x Ix)|].
      assert (Cv : coming v = round v) by (unfold coming, in_count; destruct (at_phase v); congruence || lia). rewrite Cv.
      unfold may_shared in M. fold v in M. rewrite M in Ix. apply (positions_of_a_part _ 0 (fun j z Ez => content_is_numbered _ 0 j z Ez)) in Ix. lia.
    + destruct (at_phase v) eqn:Pv; try discriminate. destruct (agree (cfg r) r (depth r) a v) as [u0|] eqn:Ag; [|discriminate]. injection E as <-.
      assert (Q : in_place (begins r) u0).
      { apply (Answer (Agreed a)); [simpl; rewrite Pv; exact Ag|]. intros a' Ea Pa Ms. injection Ea as <-. destruct M as [M1 M2].
        destruct (nth_told W _ s t r _ Fo M2) as [y [Y1 Y2]].
        assert (y = Agreed a) as ->.
        { destruct Y2 as [->|[a1 [b [E1 [-> Al]]]]]; [reflexivity|]. injection E1 as <-. rewrite (alike_same a b Al (proj1 Ms) (proj1 (proj2 Ms))). reflexivity. }
        assert (My : may (own W cfg (fun r => content (places s r))) (fun r => content (places s r)) t r (Got (Agreed a))) by (split; [rewrite (a_pending _ _ _ _ Fo); exact M1|exact Y1]).
        pose proof (all_groups_are_agreed_on W _ depth _ t r a (own_ok W cfg ok _) (proj1 (join r H)) (emits_all r a H) I H My) as G. rewrite Nr in G. exact (proj2 (G Pv Ms)). }
      split; [destruct Q; unfold asks_nothing; destruct (at_phase u0) eqn:P0; constructor; auto; unfold coming, in_count in *; simpl; rewrite ?P0 in *; assumption|].
      rewrite Er. assert (Re : read (asks_nothing u0) = read v) by (rewrite <- (nothing_is_read_of_an_answer (cfg r) r (depth r) v (Agreed a) u0) by (simpl; rewrite Pv; exact Ag); unfold asks_nothing; destruct (at_phase u0); reflexivity).
      rewrite Re. exact Rd.
    + discriminate.
    + split; [apply (Answer (Reported rs)); [exact E|discriminate]|]. rewrite Er, (nothing_is_read_of_an_answer (cfg r) r (depth r) v (Reported rs) u E). exact Rd.
  - destruct (a_rank _ _ _ _ Fo r H) as [w [en [m [Nr [_ T]]]]]. unfold at_rank in T. rewrite Bg in T. fold v in T, Nr.
    pose proof (g_core _ _ _ _ _ I r H) as K. rewrite Nr in K.
    assert (Pv : at_phase v = COUNT) by (simpl in E; change (at_phase (draws (length mine) (far =? total) v)) with (at_phase v) in E; destruct (at_phase v); try discriminate; reflexivity).
    unfold tied in T. rewrite Pv in T. destruct T as [Wz _]. pose proof (b_read _ _ _ _ _ _ (b_rank _ _ _ _ _ B r H) Bg) as Br. rewrite (At r H Bg) in Br. fold v in Br.
    split.
    + apply (what_is_held_stays_in_place_with_an_answer (begins r) (cfg r) r (depth r) (draws (length mine) (far =? total) v) (Counted cs) u (configs_ok _ _ ok r H)
        (fun k gs t d => surplus r k gs t d H) (proj2 (join r H)) (k_aligned _ _ _ _ _ _ K) (k_plan _ _ _ _ _ _ K)); [discriminate|exact E|destruct P; constructor; assumption].
    + rewrite (nothing_is_read_of_an_answer _ _ _ _ _ _ E). change (read (draws (length mine) (far =? total) v)) with (read v).
      simpl in E. change (at_phase (draws (length mine) (far =? total) v)) with (at_phase v) in E. rewrite Pv in E. pose proof (held_count _ _ _ _ _ E) as He. cbv zeta in He. unfold held in He. injection He as _ _ _ Hr.
      rewrite Hr. change (round (draws (length mine) (far =? total) v)) with (round v). lia.
Qed.

(** ** What an update trains on *)

(** The places of the common order that rank [r] trains on in update [u]. *)
Definition dealt_places (s : shared_sys) (u r : nat) : list nat := map (place_of s r) (samples_of (steps_in_round u (rank_of (base s) r))).

(** The samples of update [u] lie, in what a rank has drawn, at the places of its part, in order. *)
Lemma samples_of_a_part : forall s r u, shared_reachable s -> r < W -> begun s r = true -> u <= round (rank_of (base s) r) ->
  map (place_of s r) (filter (of_round (begins r) u) (content (places s r))) = part_of u r.
Proof.
  intros s r u R H Bg L. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H Bg) as [Ep [_ Lr]].
  destruct (parts_follow_each_other r (rounds_of cfg s r) u ltac:(lia)) as [a [c [E La]]]. rewrite E in Ep.
  unfold Drawing.content. rewrite Ep, !content_from_app, !filter_app, !Nat.add_0_l.
  rewrite (filter_all _ _ false), (filter_all _ _ true), (filter_all _ _ false), app_nil_r; cbv iota.
  - unfold place_of. rewrite Ep. apply places_of_a_part.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_round_spec. simpl. lia.
  - intros y I. apply positions_of_content in I. apply of_round_spec. simpl. lia.
  - intros y I. apply positions_of_content in I. apply not_true_is_false. rewrite of_round_spec. lia.
Qed.

(** UPDATE: at every moment a step of round [u] holds only samples at the places of the part of update [u] that its rank draws. *)
Theorem an_update_holds_only_what_its_rank_draws_of_it : forall s r x y, shared_reachable s -> r < W -> In x (steps_of (rank_of (base s) r)) -> In y (s_group x) ->
  In (place_of s r y) (part_of (s_round x) r).
Proof.
  intros s r x y R H Ix Iy. destruct (what_is_drawn_is_in_place s R r H) as [[P1 _ _] _].
  pose proof (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H) as Nl. cbv zeta in Nl.
  assert (I : In y (content (places s r))) by (apply (Permutation_in y Nl), in_or_app; left; apply in_concat; exists (s_group x); split; [apply in_map, Ix|exact Iy]).
  pose proof (P1 x Ix y Iy) as B. destruct (begun s r) eqn:Bg.
  - assert (L : s_round x <= round (rank_of (base s) r)).
    { apply positions_of_content in I. destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H Bg) as [Ep [_ Lr]].
      rewrite Ep, drawn_length, Lr in I. apply Nat.nlt_ge. intros O. pose proof (begin_of_rises (fun u => length (part_of u r)) _ _ O). lia. }
    rewrite <- (samples_of_a_part s r _ R H Bg L). apply in_map, filter_In. split; [exact I|]. apply of_round_spec, B.
  - destruct (shared_runs W total cfg depth order deal wish ok deal_next deal_feeds wish_some s R) as [Bk _].
    destruct (b_fresh _ _ _ _ _ _ (b_rank _ _ _ _ _ Bk r H) Bg) as [_ [_ [Z _]]]. rewrite Z in I. destruct I.
Qed.

(** UPDATE, COVER, ONCE: once a rank is past update [u], it has trained on each place of its part, once. *)
Theorem a_rank_past_an_update_trains_on_what_it_drew_of_it : forall s r u, shared_reachable s -> r < W -> is_past u (rank_of (base s) r) ->
  Permutation (dealt_places s u r) (part_of u r).
Proof.
  intros s r u R H Pa. set (v := rank_of (base s) r) in *. destruct (what_is_drawn_is_in_place s R r H) as [Pl Rd]. fold v in Pl, Rd.
  assert (All : has_done (begins r) (content (places s r)) u v /\ begun s r = true /\ (u <= round v \/ total <= first_of u)).
  { destruct Pa as [L|[En Co]].
    - split; [left; split; [exact L|]|split; [|left; lia]].
      + split; [exact (with_shared_shards_nothing_is_lost W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H)|right].
        exact (Nat.le_trans _ _ _ (begin_of_rises _ _ _ L) Rd).
      + destruct (shared_runs W total cfg depth order deal wish ok deal_next deal_feeds wish_some s R) as [Bk _]. destruct (begun s r) eqn:Bg; [reflexivity|exfalso].
        destruct (b_fresh _ _ _ _ _ _ (b_rank _ _ _ _ _ Bk r H) Bg) as [Z _]. unfold v in L. rewrite Z in L. simpl in L. lia.
    - destruct (join 0 (some_rank _ _ ok)) as [J1 J2].
      destruct (a_complete_rank_has_planned_what_it_has_drawn W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H J1 J2 En Co) as [D [Bg Pm]]. fold v in Pm.
      split; [right; exact Pm|]. split; [exact Bg|]. destruct (Nat.le_gt_cases u (round v)) as [L|L]; [left; exact L|right].
      destruct (a_rank_has_drawn_what_was_dealt_to_it W total cfg depth order deal wish ok deal_next deal_feeds wish_some s r R H Bg) as [_ [_ Lr]].
      rewrite drawn_in_updates, Lr in D. fold v in D. unfold first_of in *. assert (S (round v) * n <= u * n) by (apply Nat.mul_le_mono_r; lia). lia. }
  destruct All as [Pm [Bg C]]. unfold dealt_places. fold v.
  rewrite (what_a_rank_past_a_round_holds_of_it (begins r) (content (places s r)) v u (begin_of_rises _) (fun i x => content_is_numbered _ 0 i x) Pl Pm).
  destruct (Nat.le_gt_cases u (round v)) as [L|L]; [rewrite (samples_of_a_part s r u R H Bg L); reflexivity|]. destruct C as [C|C]; [lia|].
  assert (Z : length (part_of u r) = 0) by (pose proof (share_within W deal (fun _ => 0) (first_of u) r H) as S; rewrite dealt_out_size in S; unfold part_of; unfold deal in S; lia).
  rewrite (filter_all _ _ false); [apply length_zero_iff_nil in Z; rewrite Z; reflexivity|]. intros y _. apply not_true_is_false. rewrite of_round_spec. simpl. lia.
Qed.

(** And once all ranks are, each of the places from u n up to (u + 1) n, as far as the order goes, once. *)
Theorem a_dealt_update_holds_exactly_what_lies_at_its_places : forall s u, shared_reachable s -> (forall r, r < W -> is_past u (rank_of (base s) r)) ->
  Permutation (concat (map (dealt_places s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n)).
Proof.
  intros s u R Pa. transitivity (concat (map (part (first_of u)) (ranks W))).
  - assert (L : forall r, In r (seq 0 W) -> r < W) by (intros r I; apply in_seq in I; lia). unfold ranks. revert L. generalize (seq 0 W).
    induction l as [|r l IH]; intros L; simpl; [constructor|]. apply Permutation_app; [|apply IH; intros z I; apply L; right; exact I].
    pose proof (L r (or_introl eq_refl)) as Hr. exact (a_rank_past_an_update_trains_on_what_it_drew_of_it s r u R Hr (Pa r Hr)).
  - rewrite (part_next (first_of u)). unfold first_of. destruct (Nat.le_gt_cases total (u * n)) as [O|O].
    + rewrite (Nat.min_l _ _ O). replace (Nat.min n (total - total)) with 0 by lia. replace (Nat.min total (S u * n) - u * n) with 0 by lia. reflexivity.
    + rewrite (Nat.min_r total (u * n)) by lia. replace (Nat.min n (total - u * n)) with (Nat.min total (S u * n) - u * n) by (simpl; lia). reflexivity.
Qed.

End Dealt.

(** The shipped machine, with any number of portions (R16.4) by any loads, whatever ranks say that they want: of update [u] a rank trains
    on what it drew of it, and all together on each of its places, once; and step j is the same step on all. *)
Theorem the_shipped_machine_trains_on_updates_dealt_by_load : forall W n total cfg depth order told wish, 1 <= W -> W <= n -> ships_updates W n cfg ->
  (forall d, Forall (fun loads => length loads = W) (told d) /\ (length (told d) = 1 \/ 1 <= length (told d) /\ 3 * W <= n)) ->
  (forall r k d w, r < W -> 1 <= wish r k d w []) ->
  let part := by_load n total told in
  forall s, shared_reachable W total cfg depth order (fun _ => part) wish s ->
  (forall r x y, r < W -> In x (steps_of (rank_of (base s) r)) -> In y (s_group x) -> In (place_of s r y) (part (Nat.min total (s_round x * n)) r)) /\
  (forall r u, r < W -> is_past u (rank_of (base s) r) -> Permutation (dealt_places s u r) (part (Nat.min total (u * n)) r)) /\
  (forall u, (forall r, r < W -> is_past u (rank_of (base s) r)) ->
    Permutation (concat (map (dealt_places s u) (seq 0 W))) (seq (u * n) (Nat.min total (S u * n) - u * n))) /\
  (forall r q j x y, r < W -> q < W -> nth_error (steps_of (rank_of (base s) r)) j = Some x -> nth_error (steps_of (rank_of (base s) q)) j = Some y ->
    s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y).
Proof.
  intros W n total cfg depth order told wish Hw Hn Sp T Ws part s R. destruct (what_ships_meets_every_assumption_of_updates W n cfg Hw Hn Sp) as [Ok [Jm [Su [Em _]]]].
  destruct (portions_by_load_meet_every_assumption W n total told Hw Hn T) as [Nx So]. fold part in Nx, So. split; [|split; [|split]].
  - intros r x y. exact (an_update_holds_only_what_its_rank_draws_of_it W total n cfg depth order part wish Ok Nx So Ws Jm Su Em s r x y R).
  - intros r u. exact (a_rank_past_an_update_trains_on_what_it_drew_of_it W total n cfg depth order part wish Ok Nx So Ws Jm Su Em s r u R).
  - intros u. exact (a_dealt_update_holds_exactly_what_lies_at_its_places W total n cfg depth order part wish Ok Nx So Ws Jm Su Em s u R).
  - intros r q j x y. apply (with_shared_shards_rounds_are_aligned W total cfg depth order _ wish Ok (deal_next W total n part Nx) (deal_feeds W total n part Nx So) Ws s r q j x y R).
Qed.
