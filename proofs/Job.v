(** Jobs with shared shards: each run of [Drawing.v] is followed by one of [System.v], and what follows from that for the job. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Keeps Protocol Termination Shards Drawing.
Import ListNotations.

Section Job.
Variables (W total : nat).
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable order : nat -> sample.
Variable deal : (nat -> nat) -> nat -> nat -> list nat.
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis deal_next : forall ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal ws d) (seq d n).
Hypothesis deal_feeds : forall ws d r, r < W -> 1 <= ws r -> 1 <= length (deal ws d r) \/ total <= d + length (dealt_out W deal ws d).
Hypothesis wish_some : forall r k d w, r < W -> 1 <= wish r k d w [].

Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation shared_step := (shared_step W total cfg depth order deal wish).
Notation content := (content order).
Notation share_of := (share_of deal).
Notation far_of := (far_of W deal).
Notation first_wants := (first_wants cfg).
Notation drawn := (drawn W deal).
Notation drawn_by := (drawn_by W deal).

(** ** Inputs *)

Lemma content_from_app : forall a b q, content_from order q (a ++ b) = content_from order q a ++ content_from order (q + length a) b.
Proof. induction a as [|p a IH]; intros b q; simpl; [rewrite Nat.add_0_r; reflexivity|]. rewrite IH. do 2 f_equal. f_equal. lia. Qed.

Lemma content_from_length : forall a q, length (content_from order q a) = length a.
Proof. induction a as [|p a IH]; intros q; simpl; [reflexivity|]. rewrite IH. reflexivity. Qed.

Lemma content_length : forall a, length (content a) = length a.
Proof. intros a. apply content_from_length. Qed.

Lemma firstn_of_more : forall (A : Type) k n (a b : list A), n + k <= length a -> firstn k (skipn n (a ++ b)) = firstn k (skipn n a).
Proof.
  intros A k n a b L. rewrite skipn_app, firstn_app. replace (k - length (skipn n a)) with 0 by (rewrite skipn_length; lia).
  replace (n - length a) with 0 by lia. simpl. apply app_nil_r.
Qed.

Definition big (input : nat -> list sample) : nat := S (sum_nat (map (fun r => length (input r)) (seq 0 W))).
Definition own (input : nat -> list sample) (r : nat) : config := wide (big input) (cfg r).
Notation reachable input := (System.reachable W (own input) depth input).

(** At least [k] steps lead from one state to the other. *)
Definition leads (input : nat -> list sample) (k : nat) (t t' : sys) : Prop := exists n, k <= n /\ path W (own input) depth input t n t'.

Lemma path_joins : forall input t n u, path W (own input) depth input t n u -> forall m v, path W (own input) depth input u m v ->
  path W (own input) depth input t (n + m) v.
Proof. induction 1 as [|t l u n v St P IH]; intros m x Q; simpl; [exact Q|]. eapply path_on; [exact St|apply IH, Q]. Qed.

Lemma leads_by_a_step : forall input t l u, System.step W (own input) depth input t l u -> leads input 1 t u.
Proof. intros input t l u St. exists 1. split; [lia|]. eapply path_on; [exact St|apply path_here]. Qed.

Lemma leads_on : forall input t l u k v, System.step W (own input) depth input t l u -> leads input k u v -> leads input k t v.
Proof. intros input t l u k v St [n [L P]]. exists (S n). split; [lia|]. eapply path_on; eauto. Qed.

Lemma reached_by : forall input k t u, reachable input t -> leads input k t u -> reachable input u.
Proof. intros input k t u R [n [_ P]]. induction P as [|t l u n v St P IH]; [exact R|]. apply IH. eapply System.reach_step; [exact R|exact St]. Qed.

Lemma own_ok : forall input, setting_ok W (own input).
Proof.
  intros input. destruct ok as [Sr Co Pd]. constructor; [exact Sr| |].
  - intros r H. apply wide_ok; [unfold big; lia|auto].
  - intros r q Hr Hq E. unfold own. rewrite (Pd r q Hr Hq E). reflexivity.
Qed.

Lemma sum_nat_in : forall f l (r : nat), In r l -> f r <= sum_nat (map f l).
Proof. intros f. induction l as [|x l IH]; intros r []; simpl; [subst; lia|]. specialize (IH r H). lia. Qed.

Lemma big_above : forall input r, r < W -> length (input r) < big input.
Proof. intros input r H. unfold big. apply le_n_S, (sum_nat_in (fun r => length (input r))). apply in_seq. lia. Qed.

(** ** What each rank has heard and drawn *)

Definition heard (s : shared_sys) (r : nat) : list (nat -> nat) :=
  flat_map (fun x => match x with Some w => [w] | None => [] end) (firstn (got (base s) r) (told s)).
Definition rounds_of (s : shared_sys) (r : nat) : list (nat -> nat) := rev (heard s r) ++ [first_wants].

Record book (s : shared_sys) (r : nat) : Prop := {
  b_fresh : begun s r = false -> rank_of (base s) r = initial (cfg r) r /\ got (base s) r = 0 /\ places s r = [] /\ upto s r = 0 /\
    pending (base s) r = false;
  b_places : begun s r = true -> places s r = drawn_by r (rounds_of s r);
  b_upto : begun s r = true -> upto s r = drawn (rounds_of s r);
  b_ended : begun s r = true -> ended (rank_of (base s) r) = (upto s r =? total);
  b_round : begun s r = true -> length (heard s r) = round (rank_of (base s) r);
  b_read : begun s r = true -> read (rank_of (base s) r) + wanted (rank_of (base s) r) = length (places s r);
  b_want : at_phase (rank_of (base s) r) = COUNT -> ended (rank_of (base s) r) = false ->
    (window (rank_of (base s) r) = [] -> 1 <= wants s r) /\
    (forall ws, nth_error (told s) (got (base s) r) = Some (Some ws) -> ws r = wants s r) }.

Record books (s : shared_sys) : Prop := {
  b_rank : forall r, r < W -> book s r;
  b_told : length (told s) = length (log (base s));
  b_kind : forall k x, nth_error (results (base s)) k = Some x -> is_counted x = false -> nth_error (told s) k = Some None }.

Definition extends (input : nat -> list sample) (s : shared_sys) : Prop :=
  forall r, r < W -> exists ext, input r = content (places s r ++ ext) /\ (begun s r = true -> ended (rank_of (base s) r) = true -> ext = []).

(** ** Following *)

(** [t] has come as far as [s], and each rank of it is one of [s] in another dress, of which [reads] says how it reads. *)
Record beside (reads : nat -> nat -> bool -> Prop) (s : shared_sys) (t : sys) : Prop := {
  a_got : forall q, got t q = got (base s) q;
  a_pending : forall q, pending t q = pending (base s) q;
  a_running : forall q, running t q = running (base s) q;
  a_log : Forall2 alike_result (results (base s)) (results t);
  a_rank : forall r, r < W -> exists w e m, rank_of t r = dress w e m (rank_of (base s) r) /\ alike_posts (posted (rank_of (base s) r)) m /\ reads r w e }.

Definition at_rank (input : nat -> list sample) (s : shared_sys) (q w : nat) (e : bool) : Prop :=
  if begun s q then tied (length (input q)) (rank_of (base s) q) w e else w = big input /\ e = false.

Definition following (input : nat -> list sample) : shared_sys -> sys -> Prop := fun s => beside (at_rank input s) s.
(** But for one rank. *)
Definition following_but (r : nat) (input : nat -> list sample) : shared_sys -> sys -> Prop := fun s => beside (fun q w e => q <> r -> at_rank input s q w e) s.

Lemma following_is : forall r input s t, following input s t -> following_but r input s t.
Proof. intros r input s t []. constructor; auto. intros q Hq. destruct (a_rank0 q Hq) as [w [e [m [E1 [E2 E3]]]]]. exists w, e, m. auto. Qed.

Definition like (e x : event) : Prop :=
  match e, x with Got _, Got _ => True | StepTaken, StepTaken => True | Got _, _ | _, Got _ | StepTaken, _ | _, StepTaken => False | _, _ => True end.

Lemma rank_followed : forall input s s' t r u x x' w e m w' e' m', following_but r input s t -> rank_of t r = dress w e m (rank_of (base s) r) -> like x x' ->
  base s' = with_rank (base s) r u x -> begun s' r = true -> (forall q, q <> r -> begun s' q = begun s q) ->
  alike_posts (posted u) m' -> tied (length (input r)) u w' e' ->
  following input s' (with_rank t r (dress w' e' m' u) x').
Proof.
  intros input s s' t r u x x' w e m w' e' m' [N1 N2 N3 N4 N5] Nr Lk B Bg Bo A T. constructor; rewrite B; unfold with_rank; cbn [got pending running log rank_of]; [| | |exact N4|].
  - intros q. destruct x, x'; simpl in Lk; try contradiction; auto; unfold update; destruct (q =? r); auto; rewrite N1; reflexivity.
  - intros q. rewrite Nr. change (has_posted (dress w e m (rank_of (base s) r)) (dress w' e' m' u)) with (has_posted (rank_of (base s) r) u).
    destruct (has_posted _ _); [|auto]. unfold update. destruct (q =? r); auto.
  - intros q. destruct x, x'; simpl in Lk; try contradiction; auto; unfold update; destruct (q =? r); auto.
  - intros q Hq. unfold at_rank. rewrite B. unfold with_rank. cbn [rank_of]. destruct (Nat.eq_dec q r) as [->|Nq].
    + rewrite !update_same, Bg. exists w', e', m'. auto.
    + rewrite !update_other by assumption. rewrite (Bo q Nq). destruct (N5 q Hq) as [a [b [c [E1 [E2 E3]]]]]. exists a, b, c. split; [exact E1|]. split; [exact E2|exact (E3 Nq)].
Qed.

Lemma followed_invariant : forall input t r, reachable input t -> r < W ->
  read (rank_of t r) <= length (input r) /\ length (window (rank_of t r)) <= read (rank_of t r) /\ sync t r.
Proof.
  intros input t r R Hr. pose proof (invariant_of W (own input) depth input (own_ok input) t R) as I.
  pose proof (g_core _ _ _ _ _ I r Hr) as K. split; [exact (k_read _ _ _ _ _ _ K)|]. split; [|exact (g_sync _ _ _ _ _ I r Hr)].
  pose proof (Permutation_length (k_cons _ _ _ _ _ _ K)) as L. rewrite !app_length, firstn_length in L. lia.
Qed.

Lemma nth_told : forall reads s t r x, beside reads s t -> nth_error (results (base s)) (got (base s) r) = Some x ->
  exists y, nth_error (results t) (got t r) = Some y /\ alike_result x y.
Proof.
  intros reads s t r x F. rewrite (a_got _ _ _ F). pose proof (a_log _ _ _ F) as L. generalize (got (base s) r). induction L as [|a b la lb H L IH]; intros [|k] E; simpl in *; try discriminate.
  - injection E as <-. eauto.
  - apply IH, E.
Qed.

(** Room to read what is drawn. *)
Lemma room : forall input s r, extends input s -> books s -> r < W -> begun s r = true ->
  exists more, read (rank_of (base s) r) + wanted (rank_of (base s) r) + more = length (input r) /\ (ended (rank_of (base s) r) = true -> more = 0) /\
    forall k, k <= wanted (rank_of (base s) r) ->
      firstn k (skipn (read (rank_of (base s) r)) (input r)) = firstn k (skipn (read (rank_of (base s) r)) (content (places s r))).
Proof.
  intros input s r X B Hr Bg. destruct (X r Hr) as [ext [E Ee]]. pose proof (b_read _ _ (b_rank _ B r Hr) Bg) as Rd.
  exists (length ext). rewrite E, content_length, app_length. split; [lia|]. split; [intros En; rewrite (Ee Bg En); reflexivity|].
  intros k Hk. unfold Drawing.content. rewrite content_from_app. apply firstn_of_more. rewrite content_from_length. lia.
Qed.

(** ** A step is followed *)

Lemma step_with_rank : forall input t r e v, r < W -> may (own input) input t r e -> transition (own input r) r (depth r) (rank_of t r) e = Some v ->
  System.step W (own input) depth input t (LRank r e) (with_rank t r v e).
Proof. intros input t r e v Hr M E. exact (StepRank W (own input) depth input t r e v Hr M E). Qed.

Lemma ready_is_read : forall input t r a u w e m, reachable input t -> r < W -> may (own input) input t r (Got (Agreed a)) -> at_phase u = OFFER ->
  rank_of t r = dress w e m u -> o_ready a = true -> w = 0.
Proof.
  intros input t r a u w e m R Hr M P E Ra. pose proof (invariant_of W (own input) depth input (own_ok input) t R) as I.
  destruct (own_ok input) as [O1 O2 O3].
  pose proof (may_admissible W (own input) depth input O1 O3 t r _ I Hr M) as [_ Ad]. specialize (Ad Ra).
  pose proof (g_core _ _ _ _ _ I r Hr) as K. assert (P' : at_phase (rank_of t r) = OFFER) by (rewrite E; exact P).
  destruct (k_offer _ _ _ _ _ _ K P') as [o [Po O]]. destruct (of_ready _ _ _ _ O (Ad o Po)) as [_ [Wz _]]. rewrite E in Wz. exact Wz.
Qed.

Lemma rank_step_followed : forall input s t r e u, reachable input t -> following input s t -> extends input s -> books s -> r < W -> begun s r = true ->
  may_shared cfg order s r e -> handle_shared (cfg r) r (depth r) (rank_of (base s) r) e = Some u ->
  (forall s', base s' = with_rank (base s) r u e -> begun s' = begun s -> exists t', leads input 1 t t' /\ following input s' t') /\
  ended u = ended (rank_of (base s) r) /\ read u + wanted u = read (rank_of (base s) r) + wanted (rank_of (base s) r) /\ round u = round (rank_of (base s) r) /\
  (at_phase u = COUNT -> (exists a, e = Got (Agreed a) /\ at_phase (rank_of (base s) r) = OFFER) \/
     ((forall a, e <> Got a) /\ at_phase (rank_of (base s) r) = COUNT /\ window u = window (rank_of (base s) r))).
Proof.
  intros input s t r e u R F X B Hr Bg M E. destruct (a_rank _ _ _ F r Hr) as [w [en [m [Nr [Na T]]]]]. unfold at_rank in T. rewrite Bg in T.
  pose proof (following_is r input s t F) as Fr. destruct (followed_invariant input t r R Hr) as [I1 _]. rewrite Nr in I1. change (read (dress w en m (rank_of (base s) r))) with (read (rank_of (base s) r)) in I1.
  set (v := rank_of (base s) r) in *.
  destruct (is_plain e) eqn:Pl.
  - assert (Tr : transition (cfg r) r (depth r) v e = Some u) by (destruct e as [| |[a|cs|rs]| | | |]; try discriminate; exact E).
    destruct (plain_followed _ (big input) _ _ _ _ _ _ _ _ _ Pl T I1 Na Tr) as [m' [T1 [T2 T3]]].
    assert (My : may (own input) input t r e).
    { destruct (dress_views w en m v) as [V1 [V2 [V3 [V4 [V5 [V6 [V7 [V8 _]]]]]]]].
      destruct e as [| |[a|cs|rs]| | |cause|]; try discriminate; unfold may_shared, may in M |- *; fold v in M; try rewrite Nr;
        try (first [exact Logic.I|rewrite (a_running _ _ _ F); exact M|rewrite V5, V1; exact M|rewrite V8, V7; exact M|exact M]).
      destruct M as [M1 M2]. split; [rewrite (a_pending _ _ _ F); exact M1|]. destruct (nth_told _ s t r _ F M2) as [y [Y1 Y2]].
      destruct Y2 as [->|[? [? [Y2 _]]]]; [exact Y1|discriminate]. }
    pose proof (keeps_tied _ _ _ _ _ T T3) as T4. split.
    + intros s' Bs Bb. exists (with_rank t r (dress w en m' u) e). split.
      * eapply leads_by_a_step, step_with_rank; [exact Hr|exact My|rewrite Nr; exact T1].
      * apply (rank_followed input s s' t r u e e w en m w en m' Fr Nr); [destruct e; exact Logic.I|exact Bs|rewrite Bb; exact Bg|intros; rewrite Bb; reflexivity|exact T2|exact T4].
    + destruct T3 as [K1 [K2 [K3 [K4 [K5 K6]]]]]. rewrite K1, K2, K3, K5. repeat split. intros P. right. destruct K6 as [K6|[_ [_ K6]]]; [|contradiction].
      assert (Pv : at_phase v = COUNT) by congruence. split; [|auto]. intros a ->. destruct a; try discriminate.
      simpl in Tr. rewrite Pv in Tr. discriminate.
  - destruct e as [xs en0 full0| |[a|cs|rs]| | | |]; try discriminate.
    + destruct (room input s r X B Hr Bg) as [more [Ro [Mo Fi]]]. fold v in Ro, Mo, Fi.
      assert (Lx : length xs <= wanted v).
      { unfold handle_shared in E. destruct (wanted v =? 0); [discriminate|]. destruct (wanted v <? length xs) eqn:L; [discriminate|]. apply Nat.ltb_ge in L. exact L. }
      destruct (read_followed _ (big input) _ _ (depth r) _ _ _ _ _ _ _ _ _ T Na Ro Mo E) as [en1 [full1 [w' [e' [m' [T1 [T2 [T3 [T4 [T5 [T6 [T7 [T8 [T9 [T10 T11]]]]]]]]]]]]]]].
      split.
      * intros s' Bs Bb. exists (with_rank t r (dress w' e' m' u) (SamplesRead xs en1 full1)). split.
        -- eapply leads_by_a_step, step_with_rank; [exact Hr| |rewrite Nr; exact T1].
           unfold may. rewrite Nr. change (read (dress w en m v)) with (read v). change (at_phase (dress w en m v)) with (at_phase v).
           split; [rewrite (Fi _ Lx); exact M|]. split; [exact T4|]. split; [left; exact T6|]. intros H. split; [reflexivity|exact (T5 H)].
        -- apply (rank_followed input s s' t r u (SamplesRead xs en0 full0) _ w en m w' e' m' Fr Nr); [exact Logic.I|exact Bs|rewrite Bb; exact Bg|intros; rewrite Bb; reflexivity|exact T2|exact T3].
      * split; [exact T7|]. split; [exact T8|]. split; [exact T9|]. intros P. contradiction.
    + destruct M as [M1 M2]. destruct (nth_told _ s t r _ F M2) as [y [Y1 Y2]].
      assert (Yb : exists b, y = Agreed b /\ alike_offer a b).
      { destruct Y2 as [->|[a' [b [Y2 [-> Y3]]]]]; [exists a; split; [reflexivity|left; reflexivity]|injection Y2 as <-; eauto]. }
      destruct Yb as [b [-> Al]]. assert (My : may (own input) input t r (Got (Agreed b))) by (split; [rewrite (a_pending _ _ _ F); exact M1|exact Y1]).
      assert (Pv : at_phase v = OFFER). { simpl in E. destruct (at_phase v); try discriminate. reflexivity. }
      destruct (agreed_followed _ (big input) (cfg r) r (depth r) v w en m a b u T Na Al) as [w' [e' [m' [T1 [T2 [T3 [T4 [T5 [T6 [T7 T8]]]]]]]]]]; [|exact E|apply big_above, Hr|exact I1|].
      { intros _ Ra. exact (ready_is_read input t r b v w en m R Hr My Pv Nr Ra). }
      assert (St : leads input 1 t (with_rank t r (dress w' e' m' u) (Got (Agreed b)))).
      { eapply leads_by_a_step, step_with_rank; [exact Hr|exact My|rewrite Nr; exact T1]. }
      pose proof (reached_by _ _ _ _ R St) as R'. split.
      * intros s' Bs Bb. eexists. split; [exact St|].
        apply (rank_followed input s s' t r u (Got (Agreed a)) _ w en m w' e' m' Fr Nr); [exact Logic.I|exact Bs|rewrite Bb; exact Bg|intros; rewrite Bb; reflexivity|exact T2|].
        apply T8. destruct (followed_invariant input _ r R' Hr) as [_ [L _]]. unfold with_rank in L. cbn [rank_of] in L. rewrite update_same in L. exact L.
      * rewrite T3, T4, T5, T6. repeat split. intros _. left. eauto.
Qed.

Lemma counted_step_followed : forall input s t r cs ws u, reachable input t -> following input s t -> books s -> r < W -> begun s r = true ->
  may_shared cfg order s r (Got (Counted cs)) -> nth_error (told s) (got (base s) r) = Some (Some ws) ->
  let mine := share_of s r ws in
  let far := far_of s r ws in
  transition (cfg r) r (depth r) (draws (length mine) (far =? total) (rank_of (base s) r)) (Got (Counted cs)) = Some u ->
  (far = total -> length (input r) = length (places s r) + length mine) ->
  (forall s', base s' = with_rank (base s) r u (Got (Counted cs)) -> begun s' = begun s -> exists t', leads input 1 t t' /\ following input s' t') /\
  ended u = (far =? total) /\ read u + wanted u = length (places s r) + length mine /\ round u = S (round (rank_of (base s) r)) /\ at_phase u <> COUNT /\
  (ended (rank_of (base s) r) = true -> length mine = 0 /\ far = total).
Proof.
  intros input s t r cs ws u R F B Hr Bg M To mine far E Li. destruct (a_rank _ _ _ F r Hr) as [w [en [m [Nr [Na T]]]]]. unfold at_rank in T. rewrite Bg in T.
  pose proof (following_is r input s t F) as Fr. destruct (followed_invariant input t r R Hr) as [I1 _]. rewrite Nr in I1.
  change (read (dress w en m (rank_of (base s) r))) with (read (rank_of (base s) r)) in I1.
  pose proof (b_rank _ B r Hr) as Bk. pose proof (b_read _ _ Bk Bg) as Rd. pose proof (b_ended _ _ Bk Bg) as En. pose proof (b_want _ _ Bk) as Wa.
  assert (Ut : upto s r <= total) by (rewrite (b_upto _ _ Bk Bg); apply (no_more_is_drawn_than_there_is W total), deal_next).
  set (v := rank_of (base s) r) in *.
  assert (Pv : at_phase v = COUNT) by (simpl in E; change (at_phase (draws (length mine) (far =? total) v)) with (at_phase v) in E; destruct (at_phase v); try discriminate; reflexivity).
  unfold tied in T. rewrite Pv in T. destruct T as [Wz T]. rewrite Wz, Nat.add_0_r in Rd.
  destruct M as [M1 M2].
  assert (Ended : ended v = true -> length mine = 0 /\ far = total).
  { intros Ev. rewrite Ev in En. symmetry in En. apply Nat.eqb_eq in En. pose proof (dealt_within W total deal deal_next ws (upto s r)).
    pose proof (share_within W deal ws (upto s r) r Hr). unfold far, Drawing.far_of, mine, Drawing.share_of. lia. }
  assert (Go : forall t1 w1 e1, (forall k v, leads input k t1 v -> leads input k t v) -> following_but r input s t1 -> rank_of t1 r = dress w1 e1 m v -> (if length mine =? 0 then w1 = 0 /\ e1 = (far =? total) else is_open (length (input r)) v w1 e1) ->
    (forall s', base s' = with_rank (base s) r u (Got (Counted cs)) -> begun s' = begun s -> exists t', leads input 1 t t' /\ following input s' t') /\
    ended u = (far =? total) /\ read u + wanted u = length (places s r) + length mine /\ round u = S (round v) /\ at_phase u <> COUNT).
  { intros t1 w1 e1 On F1 Nr1 Op. destruct (counted_followed _ (big input) (cfg r) r (depth r) v w1 e1 m cs _ _ u I1 Na Op E) as [m' [T1 [T2 [T3 [T4 [T5 [T6 [T7 [T8 T9]]]]]]]]].
    split.
    - intros s' Bs Bb. exists (with_rank t1 r (dress w1 e1 m' u) (Got (Counted cs))). split.
      + eapply On, leads_by_a_step, step_with_rank; [exact Hr| |rewrite Nr1; exact T1]. split; [rewrite (a_pending _ _ _ F1); exact M1|].
        destruct (nth_told _ s t1 r _ F1 M2) as [y [Y1 Y2]]. destruct Y2 as [->|[? [? [Y2 _]]]]; [exact Y1|discriminate].
      + apply (rank_followed input s s' t1 r u (Got (Counted cs)) _ w1 e1 m w1 e1 m' F1 Nr1); [exact Logic.I|exact Bs|rewrite Bb; exact Bg|intros; rewrite Bb; reflexivity|exact T2|exact T3].
    - rewrite T4, T5, T6, T7. repeat split; [lia|exact T9]. }
  destruct (ended v) eqn:Ev.
  - destruct (Ended eq_refl) as [Z1 Z2]. destruct T as [-> ->]. destruct (Go t 0 true (fun _ _ L => L) Fr Nr) as [G1 [G2 [G3 [G4 G5]]]].
    + rewrite Z1, Z2. simpl. rewrite Nat.eqb_refl. auto.
    + auto 10.
  - destruct T as [-> Op]. destruct (length mine =? 0) eqn:Zs.
    + apply Nat.eqb_eq in Zs. set (la := far =? total) in *.
      assert (Fu : negb la = true -> la = false /\ window v <> []).
      { intros H. apply negb_true_iff in H. split; [exact H|]. intros Wn. destruct (Wa Pv eq_refl) as [W1 W2]. specialize (W1 Wn). specialize (W2 ws To).
        unfold la, far, Drawing.far_of in H. apply Nat.eqb_neq in H. pose proof (dealt_within W total deal deal_next ws (upto s r)).
        destruct (deal_feeds ws (upto s r) r Hr ltac:(lia)); [unfold mine, Drawing.share_of in Zs|]; lia. }
      pose proof (nothing_read (big input) (cfg r) r (depth r) v w m la (negb la) Pv ltac:(lia) ltac:(destruct la; reflexivity) Fu) as Nt.
      assert (St : System.step W (own input) depth input t (LRank r (SamplesRead [] la (negb la))) (with_rank t r (dress 0 la m v) (SamplesRead [] la (negb la)))).
      { apply step_with_rank; [exact Hr| |rewrite Nr; exact Nt]. unfold may. rewrite Nr. change (read (dress w false m v)) with (read v). change (at_phase (dress w false m v)) with (at_phase v).
        split; [reflexivity|]. split; [intros H; apply Nat.eqb_eq in H; specialize (Li H); simpl; lia|].
        split; [destruct la; auto|]. intros _. split; [reflexivity|rewrite Pv; discriminate]. }
      destruct (Go _ 0 la (fun k v => leads_on _ _ _ _ k v St)) as [G1 [G2 [G3 [G4 G5]]]].
      * destruct Fr as [N1 N2 N3 N4 N5]. constructor; unfold with_rank; cbn [got pending running rank_of log]; [exact N1| |exact N3|exact N4|].
        -- rewrite Nr. change (has_posted (dress w false m v) (dress 0 la m v)) with (has_posted v v). unfold has_posted. rewrite Pv, andb_false_r. exact N2.
        -- intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq]; [rewrite update_same; exists 0, la, m; repeat split; [exact Na|contradiction]|rewrite update_other by exact Nq; exact (N5 q Hq)].
      * apply update_same.
      * auto.
      * repeat split; auto; discriminate.
    + destruct (Go t w false (fun _ _ L => L) Fr Nr) as [G1 [G2 [G3 [G4 G5]]]]; [split; [reflexivity|exact Op]|]. repeat split; auto; discriminate.
Qed.

Lemma begin_followed : forall input s t r, reachable input t -> following input s t -> books s -> r < W -> begun s r = false ->
  let mine := share_of s r first_wants in
  let far := far_of s r first_wants in
  let u := post (cfg r) r (draws (length mine) (far =? total) (rank_of (base s) r)) in
  (far = total -> length (input r) = length mine) ->
  (forall s', base s' = with_rank (base s) r u Urged -> begun s' = update (begun s) r true -> exists t', leads input 0 t t' /\ following input s' t') /\
  ended u = (far =? total) /\ read u + wanted u = length mine /\ round u = 0 /\ at_phase u <> COUNT.
Proof.
  intros input s t r R F B Hr Bg mine far u Li. destruct (a_rank _ _ _ F r Hr) as [w [en [m [Nr [Na T]]]]]. unfold at_rank in T. rewrite Bg in T. destruct T as [-> ->].
  pose proof (following_is r input s t F) as Fb. destruct (b_fresh _ _ (b_rank _ B r Hr) Bg) as [Fr [_ [_ [Up _]]]].
  assert (Eu : u = post (cfg r) r (draws (length mine) (far =? total) (initial (cfg r) r))) by (unfold u; rewrite Fr; reflexivity).
  clearbody u. rewrite Fr in Nr, Na.
  assert (m = None) as -> by (destruct Na as [Na|[? [? [Na _]]]]; [exact Na|discriminate]).
  set (v := initial (cfg r) r) in *. set (sh := length mine) in *. set (la := far =? total) in *.
  assert (Bb : forall s', begun s' = update (begun s) r true -> begun s' r = true /\ forall q, q <> r -> begun s' q = begun s q).
  { intros s' E. rewrite E, update_same. split; [reflexivity|]. intros q Hq. apply update_other, Hq. }
  pose proof (big_above input r Hr) as Bi. destruct (Nat.eq_dec sh 0) as [Zs|Zs].
  - assert (La : la = true).
    { destruct la eqn:L; [reflexivity|exfalso]. unfold la, far, Drawing.far_of in L. apply Nat.eqb_neq in L. pose proof (dealt_within W total deal deal_next first_wants (upto s r)).
      destruct (deal_feeds first_wants (upto s r) r Hr (ok_window _ (configs_ok _ _ ok 0 ltac:(lia)) 0 0)); [unfold sh, mine, Drawing.share_of in Zs|]; lia. }
    assert (Ln : length (input r) = 0) by (rewrite Li; [exact Zs|apply Nat.eqb_eq; exact La]).
    destruct (post_followed 0 (big input) (cfg r) r (draws sh la v) 0 true None) as [m' [P1 [P2 P3]]].
    { change (if sh =? 0 then 0 = 0 /\ true = la else is_open 0 (draws sh la v) 0 true). rewrite Zs, La. split; reflexivity. }
    { simpl. lia. }
    { left. reflexivity. }
    rewrite <- Eu in P1, P2, P3. assert (Tr : transition (own input r) r (depth r) (rank_of t r) (SamplesRead [] true false) = Some (dress 0 true m' u)).
    { rewrite Nr, read_event. change (wanted (dress (big input) false None v)) with (big input). replace (big input =? 0) with false by (symmetry; apply Nat.eqb_neq; lia).
      cbn [length is_nil andb orb negb Nat.ltb Nat.leb]. replace (big input <? 0) with false by (symmetry; apply Nat.ltb_ge; lia). cbn [orb]. f_equal. rewrite <- P1. reflexivity. }
    assert (K : keeps (draws sh la v) u) by exact P3. destruct K as [K1 [K2 [K3 [K4 [K5 K6]]]]].
    assert (Pu : at_phase u <> COUNT) by (destruct K6 as [->|[_ [_ K6]]]; [discriminate|exact K6]).
    split.
    + intros s' Bs Be. exists (with_rank t r (dress 0 true m' u) (SamplesRead [] true false)). split.
      * exists 1. split; [lia|]. eapply path_on; [|apply path_here]. apply step_with_rank; [exact Hr| |exact Tr]. unfold may. rewrite Nr. simpl. split; [reflexivity|]. split; [lia|]. split; [auto|discriminate].
      * destruct (Bb s' Be) as [B1 B2]. apply (rank_followed input s s' t r u Urged _ (big input) false None 0 true m' Fb); auto; [rewrite Nr, Fr; reflexivity|exact Logic.I|].
        rewrite Ln. apply (keeps_tied 0 (draws sh la v)); [change (if sh =? 0 then 0 = 0 /\ true = la else is_open 0 (draws sh la v) 0 true); rewrite Zs, La; split; reflexivity|exact P3].
    + rewrite K1, K2, K3, K5. simpl. auto.
  - assert (Pu : u = draws sh la v).
    { rewrite Eu. destruct (post_eq (cfg r) r (draws sh la v)) as [[Pe _]|[_ [[Pe|Pe] _]]]; [exact Pe|discriminate|]. unfold is_ready in Pe. simpl in Pe. apply Nat.eqb_eq in Pe. contradiction. }
    split; [|rewrite Pu; simpl; repeat split; auto; discriminate].
    intros s' Bs Be. exists t. split; [exists 0; split; [lia|apply path_here]|]. destruct (Bb s' Be) as [B1 B2]. destruct Fb as [N1 N2 N3 N4 N5].
    constructor; rewrite Bs; unfold with_rank; cbn [got pending running log]; auto; [rewrite Fr, Pu; change (has_posted v (draws sh la v)) with false; exact N2|].
    intros q Hq. unfold at_rank. rewrite Bs. unfold with_rank. cbn [rank_of]. destruct (Nat.eq_dec q r) as [->|Nq].
    + rewrite update_same, B1. exists (big input), false, None. rewrite Nr, Pu. split; [reflexivity|]. split; [left; reflexivity|]. unfold tied, is_open. simpl.
      replace (sh =? 0) with false by (symmetry; apply Nat.eqb_neq; exact Zs). split; [reflexivity|lia].
    + rewrite update_other by exact Nq. rewrite (B2 q Nq). destruct (N5 q Hq) as [a [b [c [E1 [E2 E3]]]]]. exists a, b, c. split; [exact E1|]. split; [exact E2|exact (E3 Nq)].
Qed.

(** ** The books are kept *)

Lemma book_same : forall s s' q, begun s' q = begun s q -> rank_of (base s') q = rank_of (base s) q -> got (base s') q = got (base s) q ->
  places s' q = places s q -> upto s' q = upto s q -> wants s' q = wants s q -> (begun s q = false -> pending (base s') q = pending (base s) q) -> told s' = told s -> book s q -> book s' q.
Proof.
  intros s s' q E1 E2 E3 E4 E5 E6 E7 E8 B. destruct B. constructor; unfold rounds_of, heard in *; rewrite ?E1, ?E2, ?E3, ?E4, ?E5, ?E6, ?E8; auto.
  intros H. rewrite (E7 H). auto.
Qed.

Lemma heard_more : forall s s' r x, nth_error (told s) (got (base s) r) = Some x -> told s' = told s -> got (base s') r = S (got (base s) r) ->
  heard s' r = heard s r ++ match x with Some w => [w] | None => [] end.
Proof.
  intros s s' r x E T G. unfold heard. rewrite T, G, (firstn_snoc _ _ _ _ E), flat_map_app. simpl. rewrite app_nil_r. reflexivity.
Qed.

Lemma Forall2_same_length : forall (A B : Type) (P : A -> B -> Prop) l k, Forall2 P l k -> length l = length k.
Proof. induction 1 as [|x y l k H F IH]; simpl; [reflexivity|]. rewrite IH. reflexivity. Qed.

Lemma results_length : forall input s t, following input s t -> length (log t) = length (log (base s)).
Proof.
  intros input s t F. pose proof (a_log _ _ _ F) as L. apply Forall2_same_length in L.
  unfold results in L. rewrite !map_length in L. symmetry. exact L.
Qed.

Lemma answer_is_last : forall input s t r x, reachable input t -> following input s t -> r < W -> pending (base s) r = false ->
  nth_error (results (base s)) (got (base s) r) = Some x -> S (got (base s) r) = length (log (base s)).
Proof.
  intros input s t r x R F Hr P E. destruct (nth_told _ s t r x F E) as [y [Y _]]. destruct (followed_invariant input t r R Hr) as [_ [_ Sy]].
  rewrite <- (a_pending _ _ _ F) in P. destruct (sync_answer t r y Sy P Y) as [_ [L _]].
  rewrite (a_got _ _ _ F), (results_length input s t F) in L. exact L.
Qed.

Lemma got_within : forall input s t r, reachable input t -> following input s t -> r < W -> got (base s) r <= length (log (base s)) /\
  (pending (base s) r = true -> got (base s) r = length (log (base s))).
Proof.
  intros input s t r R F Hr. destruct (followed_invariant input t r R Hr) as [_ [_ Sy]].
  rewrite <- (results_length input s t F), <- (a_got _ _ _ F), <- (a_pending _ _ _ F).
  destruct Sy as [[A [B _]]|[[A [B _]]|[A [B _]]]]; split; try lia; congruence.
Qed.

Definition shrinks (s s' : shared_sys) : Prop := forall input, extends input s' -> extends input s.

Lemma drawing_shrinks : forall s s' r mine, r < W -> places s' = update (places s) r (places s r ++ mine) ->
  (forall q, q <> r -> begun s' q = begun s q /\ rank_of (base s') q = rank_of (base s) q) ->
  (begun s r = true -> ended (rank_of (base s) r) = true -> length mine = 0 /\ begun s' r = true /\ ended (rank_of (base s') r) = true) -> shrinks s s'.
Proof.
  intros s s' r mine Hr Pl Ot En input X q Hq. destruct (X q Hq) as [ext [E1 E2]]. rewrite Pl in E1. destruct (Nat.eq_dec q r) as [->|Nq].
  - rewrite update_same, <- app_assoc in E1. eexists. split; [exact E1|]. intros B1 B2. destruct (En B1 B2) as [Z [B3 B4]].
    rewrite (E2 B3 B4), app_nil_r. apply length_zero_iff_nil in Z. rewrite Z. reflexivity.
  - rewrite update_other in E1 by exact Nq. destruct (Ot q Nq) as [O1 O2]. rewrite O1, O2 in E2. eauto.
Qed.

Lemma drawn_grows : forall s s' r ws (Bk : book s r), begun s r = true -> nth_error (told s) (got (base s) r) = Some (Some ws) -> told s' = told s ->
  got (base s') r = S (got (base s) r) ->
  rounds_of s' r = ws :: rounds_of s r.
Proof.
  intros s s' r ws Bk Bg To T G. unfold rounds_of. rewrite (heard_more s s' r (Some ws) To T G). rewrite rev_app_distr. reflexivity.
Qed.

Lemma books_kept : forall input s t s', reachable input t -> following input s t -> extends input s -> books s -> shared_step s s' -> books s' /\ shrinks s s'.
Proof.
  intros input s t s' R F X B St. destruct B as [Br Bt Bk] eqn:EB. pose proof B as B0. clear EB. destruct St as [s r u Hr Bg mine far Eu|s r e u Hr Bg M E|s r cs ws u Hr Bg M To mine far E|s x P Re|s r Hr Ru Tk].
  - destruct (b_fresh _ _ (Br r Hr) Bg) as [Fr [G0 [Pl0 [Up0 Pe0]]]].
    assert (Any : ended u = (far =? total) /\ read u + wanted u = length mine /\ round u = 0 /\ at_phase u <> COUNT).
    { assert (K : keeps (draws (length mine) (far =? total) (rank_of (base s) r)) u).
      { rewrite Eu. destruct (post_followed 0 0 (cfg r) r (draws (length mine) (far =? total) (rank_of (base s) r)) (if length mine =? 0 then 0 else 1) (if length mine =? 0 then (far =? total) else false) None) as [_ [_ [_ K]]]; [| | |exact K].
        - rewrite Fr. unfold tied, is_open. simpl. destruct (length mine =? 0); auto.
        - rewrite Fr. simpl. lia.
        - rewrite Fr. left. reflexivity. }
      rewrite Fr in K. destruct K as [K1 [K2 [K3 [K4 [K5 K6]]]]]. rewrite K1, K2, K3, K5. simpl. repeat split. destruct K6 as [->|[_ [_ K6]]]; [discriminate|exact K6]. }
    destruct Any as [A1 [A2 [A3 A4]]]. split.
    + constructor; [|exact Bt|exact Bk]. intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
      * constructor; cbn [begun base places upto wants told]; unfold rounds_of, heard, with_rank; cbn [begun base places upto wants told got rank_of pending]; rewrite ?update_same, ?G0, ?Pl0; simpl firstn; intros.
        -- discriminate.
        -- simpl. unfold mine, Drawing.share_of. rewrite Up0. reflexivity.
        -- simpl. unfold far, Drawing.far_of. rewrite Up0. reflexivity.
        -- exact A1.
        -- simpl. symmetry. exact A3.
        -- rewrite A2. reflexivity.
        -- contradiction.
      * apply (book_same s); cbn [begun base places upto wants told with_rank got rank_of pending]; unfold with_rank; cbn [got rank_of pending]; rewrite ?update_other by exact Nq; auto.
        intros _. destruct (has_posted _ _); [apply update_other, Nq|reflexivity].
    + apply (drawing_shrinks _ _ r mine Hr); [reflexivity| |intros; congruence]. intros q Nq. cbn [begun base]. unfold with_rank. cbn [rank_of]. rewrite !update_other by exact Nq. auto.
  - destruct (rank_step_followed input s t r e u R F X B0 Hr Bg M E) as [_ [A1 [A2 [A3 A4]]]]. pose proof (Br r Hr) as Bk0.
    assert (He : (exists y, e = Got y) \/ (forall y, e <> Got y)) by (destruct e; eauto; right; discriminate).
    split.
    + constructor; [|exact Bt|exact Bk]. intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
      * assert (Hd : forall w, heard (mkShared (with_rank (base s) r u e) (begun s) (places s) (upto s) w (told s)) r = heard s r).
        { intros w. destruct He as [[y ->]|Ng].
          - assert (Ny : is_counted y = false) by (destruct y; [reflexivity|discriminate|reflexivity]). destruct M as [M1 M2].
            rewrite (heard_more s _ r None (Bk _ _ M2 Ny)); [apply app_nil_r|reflexivity|]. unfold with_rank. cbn [base got]. apply update_same.
          - unfold heard, with_rank. cbn [base got told]. destruct e; try reflexivity. exfalso. eapply Ng. reflexivity. }
        constructor; unfold rounds_of; rewrite ?Hd; unfold with_rank; cbn [begun base places upto wants told got rank_of pending]; rewrite ?update_same; intros H.
        -- congruence.
        -- exact (b_places _ _ Bk0 H).
        -- exact (b_upto _ _ Bk0 H).
        -- rewrite A1. exact (b_ended _ _ Bk0 H).
        -- rewrite A3. exact (b_round _ _ Bk0 H).
        -- rewrite A2. exact (b_read _ _ Bk0 H).
        -- intros En. rewrite A1 in En. destruct (A4 H) as [[a [-> Pv]]|[Ng [Pv Wv]]].
           ++ rewrite update_same. split; [intros Wn; unfold wish_of; rewrite En, Wn; apply wish_some, Hr|]. rewrite update_same. intros ws Hw.
              destruct M as [M1 M2]. pose proof (answer_is_last input s t r _ R F Hr M1 M2) as L.
              assert (Z : nth_error (told s) (S (got (base s) r)) <> None) by congruence. apply nth_error_Some in Z. lia.
           ++ destruct (b_want _ _ Bk0 Pv En) as [W1 W2]. rewrite Wv. destruct e as [| |y| | | |]; try (split; assumption). exfalso. eapply Ng. reflexivity.
      * apply (book_same s); unfold with_rank; cbn [begun base places upto wants told got rank_of pending]; rewrite ?update_other by exact Nq; auto.
        -- destruct e; auto; apply update_other, Nq.
        -- destruct e as [| |[a|cs|rs]| | | |]; auto. apply update_other, Nq.
        -- intros _. destruct (has_posted _ _); [apply update_other, Nq|reflexivity].
    + intros input' X' q Hq. destruct (X' q Hq) as [ext [E1 E2]]. exists ext. split; [exact E1|]. cbn [begun base] in E2. unfold with_rank in E2. cbn [rank_of] in E2.
      destruct (Nat.eq_dec q r) as [->|Nq]; [rewrite update_same, A1 in E2|rewrite update_other in E2 by exact Nq]; exact E2.
  - pose proof (Br r Hr) as Bk0. set (v := rank_of (base s) r) in *.
    assert (Wv : at_phase v = COUNT /\ wanted v = 0).
    { destruct (a_rank _ _ _ F r Hr) as [w [e [m [_ [_ T]]]]]. unfold at_rank in T. rewrite Bg in T. fold v in T. assert (Pv : at_phase v = COUNT).
      { simpl in E. change (at_phase (draws (length mine) (far =? total) v)) with (at_phase v) in E. destruct (at_phase v); try discriminate. reflexivity. }
      unfold tied in T. rewrite Pv in T. tauto. }
    destruct Wv as [Pv Wv]. destruct (counted_followed (read v) 0 (cfg r) r (depth r) v (if length mine =? 0 then 0 else 1) (if length mine =? 0 then far =? total else false)
      (posted v) cs (length mine) (far =? total) u) as [_ [_ [_ [_ [A1 [A2 [A3 [A4 [_ A5]]]]]]]]]; [lia|left; reflexivity| |exact E|].
    { unfold is_open. destruct (length mine =? 0); split; auto; lia. }
    split.
    + constructor; [|exact Bt|exact Bk]. intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
      * match goal with |- book ?s1 r => set (s' := s1) end.
        assert (Rs : rounds_of s' r = ws :: rounds_of s r) by (apply drawn_grows; auto; unfold s', with_rank; cbn [base got]; apply update_same).
        assert (Hd : heard s' r = heard s r ++ [ws]) by (apply (heard_more s s' r (Some ws) To); [reflexivity|unfold s', with_rank; cbn [base got]; apply update_same]).
        constructor; rewrite ?Rs, ?Hd; unfold s', with_rank; cbn [begun base places upto wants told got rank_of pending]; rewrite ?update_same; intros H.
        -- congruence.
        -- cbn [drawn_by]. rewrite <- (b_places _ _ Bk0 H), <- (b_upto _ _ Bk0 H). reflexivity.
        -- cbn [drawn]. rewrite <- (b_upto _ _ Bk0 H). reflexivity.
        -- exact A1.
        -- rewrite app_length, (b_round _ _ Bk0 H), A4. fold v. simpl. lia.
        -- rewrite A2, A3, app_length, <- (b_read _ _ Bk0 H). fold v. lia.
        -- contradiction.
      * apply (book_same s); unfold with_rank; cbn [begun base places upto wants told got rank_of pending]; rewrite ?update_other by exact Nq; auto.
        intros _. destruct (has_posted _ _); [apply update_other, Nq|reflexivity].
    + apply (drawing_shrinks _ _ r mine Hr); [reflexivity| |].
      * intros q Nq. cbn [begun base]. unfold with_rank. cbn [rank_of]. rewrite !update_other by exact Nq. auto.
      * intros _ En. rewrite (b_ended _ _ Bk0 Bg) in En. apply Nat.eqb_eq in En.
        pose proof (dealt_within W total deal deal_next ws (upto s r)). pose proof (share_within W deal ws (upto s r) r Hr).
        cbn [begun base]. unfold with_rank. cbn [rank_of]. rewrite update_same, A1. unfold far, mine, Drawing.far_of, Drawing.share_of.
        repeat split; [lia|exact Bg|apply Nat.eqb_eq; lia].
  - split.
    + assert (Gt : forall q, q < W -> got (base s) q = length (told s)).
      { intros q Hq. rewrite Bt. apply (got_within input s t q R F Hq), P, Hq. }
      constructor; cbn [begun base places upto wants told log].
      * intros q Hq. pose proof (Br q Hq) as Bk0. assert (Hd : heard (mkShared (mkSys (rank_of (base s)) (got (base s)) (fun _ => false) (log (base s) ++ [(messages W (base s), x)]) (running (base s))) (begun s) (places s) (upto s) (wants s)
          (told s ++ [if is_counted x then Some (wants s) else None])) q = heard s q).
        { unfold heard. cbn [base told got]. rewrite firstn_app, (Gt q Hq), Nat.sub_diag. simpl. rewrite app_nil_r. reflexivity. }
        constructor; unfold rounds_of; rewrite ?Hd; cbn [begun base places upto wants told got rank_of pending]; intros H.
        -- destruct (b_fresh _ _ Bk0 H) as [_ [_ [_ [_ Pe]]]]. rewrite (P q Hq) in Pe. discriminate.
        -- exact (b_places _ _ Bk0 H).
        -- exact (b_upto _ _ Bk0 H).
        -- exact (b_ended _ _ Bk0 H).
        -- exact (b_round _ _ Bk0 H).
        -- exact (b_read _ _ Bk0 H).
        -- intros En. destruct (b_want _ _ Bk0 H En) as [W1 _]. split; [exact W1|]. intros ws. rewrite (Gt q Hq), nth_error_app2, Nat.sub_diag by lia. simpl.
           destruct (is_counted x); intros Hw; [|discriminate]. injection Hw as <-. reflexivity.
      * rewrite !app_length, Bt. reflexivity.
      * intros k y Hy Ny. unfold results in Hy. cbn [log] in Hy. rewrite map_app in Hy. destruct (Nat.lt_ge_cases k (length (told s))) as [L|L].
        -- rewrite nth_error_app1 by exact L. apply (Bk k y); [|exact Ny]. rewrite nth_error_app1 in Hy by (rewrite map_length, <- Bt; exact L). exact Hy.
        -- rewrite nth_error_app2 in Hy by (rewrite map_length, <- Bt; exact L). rewrite nth_error_app2 by exact L. rewrite map_length, <- Bt in Hy.
           destruct (k - length (told s)) as [|j]; simpl in *; [injection Hy as ->; rewrite Ny; reflexivity|destruct j; discriminate].
    + intros input' X' q Hq. exact (X' q Hq).
  - split; [|intros input' X' q Hq; exact (X' q Hq)]. constructor; [|exact Bt|exact Bk]. intros q Hq. apply (book_same s); auto.
Qed.

(** ** Every run is followed *)

Lemma start_followed : forall input, following input (shared_start cfg) (start (own input)).
Proof.
  intros input. constructor; auto; [constructor|]. intros q _. exists (big input), false, None. split; [reflexivity|]. split; [left; reflexivity|split; reflexivity].
Qed.

Lemma start_books : books (shared_start cfg).
Proof.
  constructor; [|reflexivity|].
  - intros r Hr. constructor; simpl; try discriminate. auto.
  - intros k x H. destruct k; discriminate.
Qed.

Definition beginners (s : shared_sys) : nat := length (filter (begun s) (seq 0 W)).

Lemma beginners_within : forall s, beginners s <= W.
Proof.
  intros s. unfold beginners. rewrite <- (seq_length W 0) at 2. induction (seq 0 W) as [|q l IH]; simpl; [lia|]. destruct (begun s q); simpl; lia.
Qed.

Lemma one_more_begins : forall f r, r < W -> f r = false -> length (filter (update f r true) (seq 0 W)) = S (length (filter f (seq 0 W))).
Proof.
  intros f r Hr E. assert (X : In r (seq 0 W)) by (apply in_seq; lia). pose proof (seq_NoDup W 0) as Nn. revert X Nn. generalize (seq 0 W).
  induction l as [|q l IH]; intros X Nn; [destruct X|]. inversion Nn as [|? ? Nq Nn']; subst. simpl. destruct (Nat.eq_dec q r) as [->|D].
  - rewrite update_same, E. simpl. f_equal. clear - Nq. induction l as [|z l IH]; [reflexivity|]. simpl in *.
    rewrite update_other by (intros ->; tauto). destruct (f z); simpl; rewrite IH by tauto; reflexivity.
  - rewrite update_other by exact D. destruct X as [X|X]; [contradiction|]. specialize (IH X Nn'). destruct (f q); simpl; rewrite IH; reflexivity.
Qed.

(** A step that is not a rank's beginning is followed by one or more. *)
Lemma step_followed : forall input s t s', reachable input t -> following input s t -> books s -> extends input s -> books s' -> extends input s' -> shared_step s s' ->
  exists t' k, S (beginners s) <= beginners s' + k /\ leads input k t t' /\ following input s' t'.
Proof.
  intros input s t s' R F B X B' X' St.
  assert (Whole : forall r mine far, r < W -> places s' r = places s r ++ mine -> upto s' r = far -> begun s' r = true ->
    far = total -> length (input r) = length (places s r) + length mine).
  { intros r mine far Hr P U Bg Al. destruct (X' r Hr) as [ext [E1 E2]]. pose proof (b_ended _ _ (b_rank _ B' r Hr) Bg) as En. rewrite U, Al, Nat.eqb_refl in En.
    rewrite E1, (E2 Bg En), app_nil_r, content_length, P, app_length. reflexivity. }
  assert (One : forall u v : shared_sys, begun v = begun u -> S (beginners u) <= beginners v + 1) by (intros u v E; unfold beginners; rewrite E; lia).
  destruct St as [s r u Hr Bg mine far Eu|s r e u Hr Bg M E|s r cs ws u Hr Bg M To mine far E|s x P Re|s r Hr Ru Tk];
    match type of X' with extends _ ?x =>
      let b := eval cbn [base] in (base x) in assert (Bs : base x = b) by reflexivity;
      let g := eval cbn [begun] in (begun x) in assert (Bb : begun x = g) by reflexivity end.
  - subst u. destruct (b_fresh _ _ (b_rank _ B r Hr) Bg) as [_ [_ [Pl _]]]. destruct (begin_followed input s t r R F B Hr Bg) as [G _].
    + intros Al. rewrite (Whole r mine far Hr); cbn [begun base places upto]; rewrite ?update_same; auto. rewrite Pl. reflexivity.
    + destruct (G _ Bs Bb) as [t' [L F']]. exists t', 0. split; [|auto]. unfold beginners. cbn [begun]. rewrite one_more_begins by assumption. lia.
  - destruct (rank_step_followed input s t r e u R F X B Hr Bg M E) as [G _]. destruct (G _ Bs Bb) as [t' [L F']]. exists t', 1. split; [apply One|]; auto.
  - destruct (counted_step_followed input s t r cs ws u R F B Hr Bg M To E) as [G _]; [|destruct (G _ Bs Bb) as [t' [L F']]; exists t', 1; split; [apply One|]; auto].
    intros Al. apply (Whole r mine far Hr); cbn [begun base places upto]; rewrite ?update_same; auto.
  - assert (Each : forall q, q < W -> alike_msg (message (rank_of (base s) q)) (message (rank_of t q)) /\ pending t q = pending (base s) q).
    { intros q Hq. destruct (a_rank _ _ _ F q Hq) as [w [e [m [Nr [Na _]]]]]. split; [|exact (a_pending _ _ _ F q)]. rewrite Nr.
      unfold message. change (posted (dress w e m (rank_of (base s) q))) with m. destruct Na as [->|[o [p [-> [-> A]]]]]; [left; reflexivity|right; eauto]. }
    assert (Ms : Forall2 alike_msg (messages W (base s)) (messages W t)).
    { unfold messages. assert (L : forall q, In q (seq 0 W) -> q < W) by (intros q I; apply in_seq in I; lia). revert L. generalize (seq 0 W). induction l as [|q l IH]; intros L; simpl; constructor.
      - apply Each, L. left. reflexivity.
      - apply IH. intros z I. apply L. right. exact I. }
    destruct (alike_reduce _ _ _ Ms Re) as [y [Ry Ay]]. eexists; exists 1. split; [apply One; reflexivity|]. split.
    + eapply leads_by_a_step, StepExchange; [|exact Ry]. intros q Hq. destruct (Each q Hq) as [_ ->]. apply P, Hq.
    + destruct F as [N1 N2 N3 N4 N5]. constructor; auto. unfold results in *. cbn [base log]. rewrite !map_app. apply Forall2_app; [exact N4|]. constructor; [exact Ay|constructor].
  - eexists; exists 1. split; [apply One; reflexivity|]. split.
    + eapply leads_by_a_step, (StepTrained W (own input) depth input t r Hr); [rewrite (a_running _ _ _ F); exact Ru|].
      intros q Hq. destruct (a_rank _ _ _ F q Hq) as [w' [e' [m' [-> _]]]]. destruct (a_rank _ _ _ F r Hr) as [w [e [m [-> _]]]]. exact (Tk q Hq).
    + destruct F as [N1 N2 N3 N4 N5]. constructor; auto. intros z. cbn [running base]. unfold update. destruct (z =? r); auto.
Qed.

Lemma content_of_places : forall s, extends (fun r => content (places s r)) s.
Proof. intros s r Hr. exists []. rewrite app_nil_r. auto. Qed.

(** A run of [n] transitions. *)
Inductive shared_run : nat -> shared_sys -> Prop :=
| run_here : shared_run 0 (shared_start cfg)
| run_on : forall n s s', shared_run n s -> shared_step s s' -> shared_run (S n) s'.

Lemma every_run_is_followed : forall n s, shared_run n s -> books s /\ forall input, extends input s ->
  exists t k, n <= beginners s + k /\ leads input k (start (own input)) t /\ following input s t.
Proof.
  induction 1 as [|n s s' R [B IH] St].
  - split; [apply start_books|]. intros input _. exists (start (own input)), 0. split; [lia|]. split; [exists 0; split; [lia|apply path_here]|apply start_followed].
  - assert (Now : forall input, extends input s -> exists t k, n <= beginners s + k /\ leads input k (start (own input)) t /\ reachable input t /\ following input s t).
    { intros input X. destruct (IH input X) as [t [k [Nn [L F]]]]. exists t, k. split; [exact Nn|]. split; [exact L|]. split; [|exact F]. eapply reached_by; [apply System.reach_start|exact L]. }
    destruct (Now _ (content_of_places s)) as [t0 [_ [_ [_ [R0 F0]]]]]. destruct (books_kept _ s t0 s' R0 F0 (content_of_places s) B St) as [B' Sh].
    split; [exact B'|]. intros input X'. destruct (Now input (Sh input X')) as [t [k [Nn [[m [Lm P]] [R1 F1]]]]].
    destruct (step_followed input s t s' R1 F1 B (Sh input X') B' X' St) as [t' [k' [Nn' [[m' [Lm' P']] F']]]].
    exists t', (k + k'). split; [lia|]. split; [|exact F']. exists (m + m'). split; [lia|]. eapply path_joins; eauto.
Qed.

Lemma shared_runs : forall s, shared_reachable s -> books s /\ forall input, extends input s -> exists t, reachable input t /\ following input s t.
Proof.
  intros s R. assert (Rn : exists n, shared_run n s).
  { induction R as [|s s' R [n Rn] St]; [exists 0; apply run_here|exists (S n); eapply run_on; eauto]. }
  destruct Rn as [n Rn]. destruct (every_run_is_followed n s Rn) as [B H]. split; [exact B|]. intros input X. destruct (H input X) as [t [k [_ [L F]]]].
  exists t. split; [eapply reached_by; [apply System.reach_start|exact L]|exact F].
Qed.

(** ** What follows *)

(** Two states that differ at most in what is wanted, in whether the end is known, and in what an offer that is the last says of it. *)
Definition same_but_for_reading (u v : state) : Prop := exists w e m, v = dress w e m u.

Theorem a_run_of_shared_shards_follows_one_of_shards_of_ones_own : forall s, shared_reachable s ->
  exists t, reachable (fun r => content (places s r)) t /\ forall r, r < W -> same_but_for_reading (rank_of (base s) r) (rank_of t r).
Proof.
  intros s R. destruct (shared_runs s R) as [_ H]. destruct (H _ (content_of_places s)) as [t [Rt F]]. exists t. split; [exact Rt|].
  intros r Hr. destruct (a_rank _ _ _ F r Hr) as [w [e [m [E _]]]]. exists w, e, m. exact E.
Qed.

(** ALIGN. *)
Theorem with_shared_shards_rounds_are_aligned : forall s r q j x y, shared_reachable s -> r < W -> q < W ->
  nth_error (steps_of (rank_of (base s) r)) j = Some x -> nth_error (steps_of (rank_of (base s) q)) j = Some y ->
  s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y.
Proof.
  intros s r q j x y R Hr Hq Ex Ey. destruct (a_run_of_shared_shards_follows_one_of_shards_of_ones_own s R) as [t [Rt Sa]].
  destruct (Sa r Hr) as [w [e [m Er]]]. destruct (Sa q Hq) as [w' [e' [m' Eq]]].
  apply (rounds_are_aligned W _ depth _ (own_ok _) t r q j x y Rt Hr Hq); [rewrite Er; exact Ex|rewrite Eq; exact Ey].
Qed.

Theorem with_shared_shards_every_rank_makes_the_same_number_of_steps_in_a_round : forall s r q k, shared_reachable s -> r < W -> q < W ->
  k < round (rank_of (base s) r) -> k < round (rank_of (base s) q) ->
  length (steps_in_round k (rank_of (base s) r)) = length (steps_in_round k (rank_of (base s) q)).
Proof.
  intros s r q k R Hr Hq Lr Lq. destruct (a_run_of_shared_shards_follows_one_of_shards_of_ones_own s R) as [t [Rt Sa]].
  destruct (Sa r Hr) as [w [e [m Er]]]. destruct (Sa q Hq) as [w' [e' [m' Eq]]].
  pose proof (every_rank_makes_the_same_number_of_steps_in_a_round W _ depth _ (own_ok _) t r q k Rt Hr Hq) as Th. rewrite Er, Eq in Th. exact (Th Lr Lq).
Qed.

(** CONSERVE: what is in steps, in alignment, in the window and drawn but unread is what the rank has drawn. *)
Theorem with_shared_shards_nothing_is_lost : forall s r, shared_reachable s -> r < W ->
  let u := rank_of (base s) r in
  Permutation (samples_of (steps_of u) ++ concat (aligned u) ++ window u ++ skipn (read u) (content (places s r))) (content (places s r)).
Proof.
  intros s r R Hr. destruct (a_run_of_shared_shards_follows_one_of_shards_of_ones_own s R) as [t [Rt Sa]]. destruct (Sa r Hr) as [w [e [m Er]]].
  pose proof (nothing_is_lost W _ depth _ (own_ok _) t r Rt Hr) as Th. rewrite Er in Th. exact Th.
Qed.

(** DEAL: what a rank has drawn is what was dealt to it, by the wants that all ranks were told in its rounds. *)
Theorem a_rank_has_drawn_what_was_dealt_to_it : forall s r, shared_reachable s -> r < W -> begun s r = true ->
  places s r = drawn_by r (rounds_of s r) /\ upto s r = drawn (rounds_of s r) /\
  length (rounds_of s r) = S (round (rank_of (base s) r)).
Proof.
  intros s r R Hr Bg. destruct (shared_runs s R) as [B _]. pose proof (b_rank _ B r Hr) as Bk. split; [exact (b_places _ _ Bk Bg)|]. split; [exact (b_upto _ _ Bk Bg)|].
  unfold rounds_of. rewrite app_length, rev_length, (b_round _ _ Bk Bg). simpl. lia.
Qed.

Definition every_round (s : shared_sys) : list (nat -> nat) :=
  rev (flat_map (fun x => match x with Some w => [w] | None => [] end) (told s)) ++ [first_wants].

Lemma heard_first : forall s r, exists more, every_round s = more ++ rounds_of s r.
Proof.
  intros s r. unfold every_round, rounds_of, heard. 
  set (f := fun x : option (nat -> nat) => match x with Some w => [w] | None => [] end). exists (rev (flat_map f (skipn (got (base s) r) (told s)))).
  rewrite app_assoc, <- rev_app_distr, <- flat_map_app, firstn_skipn. reflexivity.
Qed.

(** DEAL: the order ends on all ranks in the same round, and how far it is drawn is the same on all. *)
Theorem the_order_ends_on_all_ranks_in_the_same_round : forall s r q, shared_reachable s -> r < W -> q < W -> begun s r = true -> begun s q = true ->
  round (rank_of (base s) r) = round (rank_of (base s) q) ->
  ended (rank_of (base s) r) = ended (rank_of (base s) q) /\ upto s r = upto s q.
Proof.
  intros s r q R Hr Hq Br Bq E. destruct (shared_runs s R) as [B _].
  destruct (a_rank_has_drawn_what_was_dealt_to_it s r R Hr Br) as [_ [Ur Lr]]. destruct (a_rank_has_drawn_what_was_dealt_to_it s q R Hq Bq) as [_ [Uq Lq]].
  assert (Same : rounds_of s r = rounds_of s q).
  { destruct (heard_first s r) as [a Ea]. destruct (heard_first s q) as [b Eb]. rewrite Ea in Eb. rewrite E, <- Lq in Lr. clear - Eb Lr.
    assert (L : length a = length b) by (apply (f_equal (@length (nat -> nat))) in Eb; rewrite !app_length in Eb; lia).
    revert b L Eb. induction a as [|x a IH]; intros [|y b] L Eb; simpl in *; try discriminate; [exact Eb|]. injection Eb as _ Eb. injection L as L. exact (IH b L Eb). }
  assert (U : upto s r = upto s q) by (rewrite Ur, Uq, Same; reflexivity). split; [|exact U].
  rewrite (b_ended _ _ (b_rank _ B r Hr) Br), (b_ended _ _ (b_rank _ B q Hq) Bq), U. reflexivity.
Qed.

Lemma drawn_by_more : forall i new old, exists more, drawn_by i (new ++ old) = drawn_by i old ++ more.
Proof.
  intros i. induction new as [|ws new IH]; intros old; simpl; [exists []; rewrite app_nil_r; reflexivity|].
  destruct (IH old) as [more ->]. rewrite <- app_assoc. eauto.
Qed.

Lemma nothing_after_the_end : forall i new old, i < W -> drawn old = total ->
  drawn (new ++ old) = total /\ drawn_by i (new ++ old) = drawn_by i old.
Proof.
  intros i new old Hi D. induction new as [|ws new [IH1 IH2]]; simpl; [auto|]. rewrite IH1, IH2. pose proof (dealt_within W total deal deal_next ws total).
  pose proof (share_within W deal ws total i Hi). split; [lia|]. assert (Z : length (deal ws total i) = 0) by lia. apply length_zero_iff_nil in Z. rewrite Z. apply app_nil_r.
Qed.

Lemma places_first : forall s r, books s -> r < W -> exists more, drawn_by r (every_round s) = places s r ++ more.
Proof.
  intros s r B Hr. pose proof (b_rank _ B r Hr) as Bk. destruct (begun s r) eqn:Bg.
  - destruct (heard_first s r) as [a ->]. rewrite (b_places _ _ Bk Bg). apply drawn_by_more.
  - destruct (b_fresh _ _ Bk Bg) as [_ [_ [-> _]]]. simpl. eauto.
Qed.

(** The place of the order at which a sample of a rank lies. *)
Definition place_of (s : shared_sys) (r : nat) (x : sample) : nat := nth (pos x) (places s r) 0.
Definition planned_places (s : shared_sys) (r : nat) : list nat := map (place_of s r) (samples_of (steps_of (rank_of (base s) r))).

(** TERM: no schedule is longer than the bound of a job with shards of its own of as many samples, and a beginning for each rank. *)
Theorem with_shared_shards_every_schedule_ends_within_the_bound : forall n s, shared_run n s ->
  n <= 2 * total + 2 + W * (6 * total + 7) + total + W * (2 * total + 3) + W.
Proof.
  intros n s R. destruct (every_run_is_followed n s R) as [B H]. set (input := fun r => content (places s r)).
  destruct (H input (content_of_places s)) as [t [k [Nn [[m [Lm P]] _]]]]. pose proof (beginners_within s).
  pose proof (every_schedule_ends_within_the_bound W (own input) depth input (own_ok input) m t P) as Bd.
  assert (Few : Termination.total W input <= total).
  { pose proof (no_more_is_drawn_than_there_is W total deal deal_next (every_round s)) as D.
    pose proof (Permutation_length (every_place_dealt_is_drawn_once_by_one_rank W total deal deal_next (every_round s))) as L.
    rewrite seq_length in L. rewrite <- L in D. eapply Nat.le_trans; [|exact D]. unfold Termination.total, sum_over, ranks.
    assert (A : forall q, In q (seq 0 W) -> q < W) by (intros q I; apply in_seq in I; lia). revert A. generalize (seq 0 W). clear D L.
    induction l as [|q l IH]; intros A; simpl; [lia|]. rewrite app_length. specialize (IH (fun z I => A z (or_intror I))).
    destruct (places_first s q B (A q (or_introl eq_refl))) as [more E]. rewrite E, app_length. unfold input at 1. rewrite content_length. lia. }
  assert (Each : sum_over W (fun r => if c_bounded (own input r) r then exchanges W input + 1 else 0) <= W * (2 * total + 3)).
  { eapply Nat.le_trans; [apply (sum_over_le _ (fun r => (2 * total + 3) + 0))|].
    - intros i _. unfold exchanges. destruct (c_bounded _ _); lia.
    - rewrite sum_over_const. assert (Z : forall j, sum_over j (fun _ => 0) = 0) by (intros j; unfold sum_over; induction (seq 0 j); auto). rewrite Z. lia. }
  unfold bound in Bd. unfold exchanges in Bd at 1. assert (W * (6 * Termination.total W input + 7) <= W * (6 * total + 7)) by (apply Nat.mul_le_mono_l; lia). lia.
Qed.

Lemma places_of_a_part : forall l a c, map (fun x => nth (pos x) (a ++ l ++ c) 0) (content_from order (length a) l) = l.
Proof.
  induction l as [|p l IH]; intros a c; simpl; [reflexivity|]. rewrite app_nth2, Nat.sub_diag by lia. simpl. f_equal.
  specialize (IH (a ++ [p]) c). rewrite <- app_assoc in IH. simpl in IH. rewrite app_length in IH. simpl in IH. rewrite Nat.add_1_r in IH. exact IH.
Qed.

Lemma place_of_content : forall s r, map (place_of s r) (content (places s r)) = places s r.
Proof. intros s r. pose proof (places_of_a_part (places s r) [] []) as H. rewrite app_nil_r in H. exact H. Qed.

(** ONCE: no place of the order is in two steps of the job, of one rank or of two, at any moment. *)
Theorem no_place_is_in_two_steps_of_the_job : forall s, shared_reachable s -> NoDup (concat (map (planned_places s) (seq 0 W))).
Proof.
  intros s R. destruct (shared_runs s R) as [B _].
  set (rest := fun r => let u := rank_of (base s) r in map (place_of s r) (concat (aligned u) ++ window u ++ skipn (read u) (content (places s r))) ++
    skipn (length (places s r)) (drawn_by r (every_round s))).
  apply (NoDup_first _ _ (concat (map rest (seq 0 W)))).
  apply (Permutation_NoDup (l := concat (map (fun r => drawn_by r (every_round s)) (ranks W))));
    [|apply (no_place_is_drawn_twice W total deal deal_next)].
  eapply Permutation_trans; [|apply concat_map_app]. unfold ranks.
  assert (L : forall r, In r (seq 0 W) -> r < W) by (intros r I; apply in_seq in I; lia). revert L. generalize (seq 0 W).
  induction l as [|r l IH]; intros L; simpl; [constructor|]. apply Permutation_app; [|apply IH; intros z I; apply L; right; exact I].
  assert (Hr : r < W) by (apply L; left; reflexivity). destruct (places_first s r B Hr) as [more E]. unfold rest. rewrite E, skipn_app, skipn_all, Nat.sub_diag. simpl.
  rewrite app_assoc. apply Permutation_app_tail. unfold planned_places. rewrite <- map_app. apply (Permutation_trans (l' := map (place_of s r) (content (places s r)))); [rewrite place_of_content; reflexivity|].
  apply Permutation_map. symmetry.
  exact (with_shared_shards_nothing_is_lost s r R Hr).
Qed.

(** A rank that is COMPLETE in join mode has planned all that it has drawn, and the order has ended. *)
Lemma a_complete_rank_has_planned_what_it_has_drawn : forall s r, shared_reachable s -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  is_ending (rank_of (base s) r) = true -> ended_as (rank_of (base s) r) = Some Complete ->
  drawn (rounds_of s r) = total /\ begun s r = true /\ Permutation (samples_of (steps_of (rank_of (base s) r))) (content (places s r)).
Proof.
  intros s r R Hr Jm Nq En O. destruct (shared_runs s R) as [B H]. destruct (H _ (content_of_places s)) as [t [Rt F]]. set (input := fun r => content (places s r)) in *.
  destruct (a_rank _ _ _ F r Hr) as [w [e [m [Nr [_ T]]]]].
  assert (En' : is_ending (rank_of t r) = true) by (rewrite Nr; exact En). assert (O' : ended_as (rank_of t r) = Some Complete) by (rewrite Nr; exact O).
  pose proof (a_complete_rank_has_planned_its_whole_input W (own input) depth input (own_ok input) t r Rt Hr Jm Nq En' O') as P.
  destruct (reachable_second W (own input) depth input (own_ok input) t Rt) as [I S]. destruct (ended_outcome W (own input) depth input (own_ok input) t r Rt Hr En') as [o [l [Hk O2]]].
  rewrite O' in O2. injection O2 as <-. assert (D : dry t r).
  { destruct (n_closed _ _ _ S l Hk) as [Q|[[Q _]|Q]]; [|unfold own in Q; simpl in Q; congruence|apply Q, Hr]. unfold quota_met, is_quota_met, own in Q. simpl in Q. rewrite Nq in Q. discriminate. }
  assert (Ee : e = true).
  { destruct D as [D1 D2]. destruct (k_window _ _ _ _ _ _ (g_core _ _ _ _ _ I r Hr)) as [X|X]; [rewrite Nr in X; exact X|rewrite D1, D2 in X; simpl in X; lia]. }
  subst e. unfold at_rank in T. destruct (begun s r) eqn:Bg; [|destruct T; discriminate].
  assert (Eu : ended (rank_of (base s) r) = true).
  { unfold tied, is_open in T. unfold is_ending in En. destruct (at_phase (rank_of (base s) r)); try discriminate; destruct (wanted (rank_of (base s) r) =? 0); try (destruct T; congruence). }
  pose proof (b_rank _ B r Hr) as Bk. rewrite (b_ended _ _ Bk Bg) in Eu. apply Nat.eqb_eq in Eu. rewrite <- (b_upto _ _ Bk Bg). split; [exact Eu|]. split; [reflexivity|].
  unfold has_planned_everything in P. rewrite Nr in P. exact P.
Qed.

(** COVER: when all ranks are COMPLETE in join mode, the job has planned each place of the order exactly once. *)
Theorem a_complete_job_has_planned_each_place_once : forall s, shared_reachable s -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  (forall r, r < W -> is_ending (rank_of (base s) r) = true /\ ended_as (rank_of (base s) r) = Some Complete) ->
  Permutation (concat (map (planned_places s) (seq 0 W))) (seq 0 total).
Proof.
  intros s R Jm Nq Cp. destruct (shared_runs s R) as [B _].
  pose proof (fun r Hr => a_complete_rank_has_planned_what_it_has_drawn s r R Hr Jm Nq (proj1 (Cp r Hr)) (proj2 (Cp r Hr))) as Each.
  assert (Dr : drawn (every_round s) = total).
  { destruct (Each 0 (some_rank _ _ ok)) as [D _]. destruct (heard_first s 0) as [a ->]. apply (nothing_after_the_end 0 a _ (some_rank _ _ ok) D). }
  rewrite <- Dr. eapply Permutation_trans; [|apply (every_place_dealt_is_drawn_once_by_one_rank W total deal deal_next)].
  unfold ranks. assert (L : forall r, In r (seq 0 W) -> r < W) by (intros r I; apply in_seq in I; lia). revert L. generalize (seq 0 W).
  induction l as [|r l IH]; intros L; simpl; [constructor|]. apply Permutation_app; [|apply IH; intros z I; apply L; right; exact I].
  destruct (Each r (L r (or_introl eq_refl))) as [D [Bg P]]. destruct (heard_first s r) as [a Ea]. rewrite Ea. destruct (nothing_after_the_end r a _ (L r (or_introl eq_refl)) D) as [_ ->].
  rewrite <- (b_places _ _ (b_rank _ B r (L r (or_introl eq_refl))) Bg). unfold planned_places. rewrite P, place_of_content. reflexivity.
Qed.

End Job.

(** ** The shipped deal, and what is wanted by tokens (R14.2) *)

Definition tokens_of (l : list sample) : nat := sum_nat (map len l).

(** The size of a window: of packed rows near the end no more than what is left for each rank, but no less than half. *)
Definition shared_window (W total : nat) (is_packed : bool) (size d : nat) : nat :=
  if is_packed then Nat.min size (Nat.max ((total - d + W - 1) / W) (Nat.div2 (S size))) else size.

(** What is carried counts by its tokens, as so many samples of average length. *)
Definition wish_for (size : nat) (held carried : list sample) : nat :=
  size - (if tokens_of carried =? 0 then 0 else (length held * tokens_of carried + tokens_of held - 1) / tokens_of held).

Definition wish_by_tokens (W total : nat) (is_packed : bool) (cfg : nat -> config) (r k d : nat) (held carried : list sample) : nat :=
  wish_for (shared_window W total is_packed (c_window (cfg r) r k) d) held carried.

Lemma a_shared_window_is_not_empty : forall W total is_packed size d, 1 <= size -> 1 <= shared_window W total is_packed size d.
Proof.
  intros W total is_packed size d S. unfold shared_window. destruct is_packed; [|exact S]. apply Nat.min_glb; [exact S|].
  apply (Nat.le_trans _ (Nat.div2 (Datatypes.S size))); [destruct size; simpl; lia|apply Nat.le_max_r].
Qed.

Theorem the_shipped_wants_meet_every_assumption : forall W total is_packed cfg, setting_ok W cfg ->
  forall r k d w, r < W -> 1 <= wish_by_tokens W total is_packed cfg r k d w [].
Proof.
  intros W total is_packed cfg ok r k d w H. unfold wish_by_tokens, wish_for. change (tokens_of [] =? 0) with true. cbn iota. rewrite Nat.sub_0_r.
  apply a_shared_window_is_not_empty, (ok_window _ (configs_ok _ _ ok r H)).
Qed.
