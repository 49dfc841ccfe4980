(** The properties of the protocol, for every number of ranks, input and schedule, and every target rule within the bounds. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps.
Import ListNotations.

(** ** Histories only grow *)

Lemma h_step_grows : forall c h x, h_released h <= length (h_steps h) ->
  (exists ext, h_steps (h_step c h x) = h_steps h ++ ext /\ Forall (fun y => h_round h <= snd (fst y)) ext /\
     (h_round (h_step c h x) = h_round h -> ext = []) /\ Forall (fun y => snd (fst y) < h_round (h_step c h x)) ext) /\
  h_round h <= h_round (h_step c h x) /\ h_released h <= h_released (h_step c h x) <= length (h_steps (h_step c h x)).
Proof.
  intros c h x L. assert (Z : forall k r, (exists ext, h_steps h = h_steps h ++ ext /\ Forall (fun y : shared_step => h_round h <= snd (fst y)) ext /\
     (h_round (mkHist k (h_round h) (h_steps h) r) = h_round h -> ext = []) /\ Forall (fun y => snd (fst y) < h_round h) ext)).
  { intros. exists []. rewrite app_nil_r. repeat split; constructor. }
  unfold h_step. destruct (h_kind h) eqn:K; destruct x; simpl; try (split; [apply (Z NOffer 0)|lia]).
  - destruct (is_bad a); simpl; [split; [apply (Z NOffer 0)|lia]|]. destruct (o_stop_rank a); simpl; (split; [apply (Z NOffer 0)|lia]).
  - split; [|rewrite app_length; lia]. eexists. split; [reflexivity|].
    assert (F : forall cs n rd, Forall (fun y : shared_step => snd (fst y) = rd) (make_shared n rd cs)) by (induction cs0; simpl; intros; constructor; auto).
    repeat split; [eapply Forall_impl; [|apply F]; simpl; intros; lia|lia|eapply Forall_impl; [|apply F]; simpl; intros; lia].
  - destruct (failure_of rs); simpl; (split; [apply (Z NOffer 0)|lia]).
Qed.

Lemma history_released : forall {h0} c rs, h_released (history_from h0 c rs) <= length (h_steps (history_from h0 c rs)).
Proof. intros. unfold history_from. apply fold_ind; [apply o_releases|]. intros h x L. apply (h_step_grows c h x L). Qed.

Lemma history_grows : forall h0 c m l, let h := history_from h0 c l in let h' := history_from h0 c (l ++ m) in
  (exists ext, h_steps h' = h_steps h ++ ext /\ Forall (fun y => h_round h <= snd (fst y)) ext) /\ h_round h <= h_round h' /\ h_released h <= h_released h'.
Proof.
  intros h0 c m l. induction m as [|x m IH] using rev_ind.
  - rewrite app_nil_r. split; [exists []; rewrite app_nil_r; split; [reflexivity|constructor]|lia].
  - destruct IH as [[e1 [E1 F1]] [R1 L1]]. cbv zeta in *. rewrite app_assoc, history_snoc. set (h := history_from h0 c (l ++ m)) in *.
    destruct (h_step_grows c h x (history_released _ _)) as [[e2 [E2 [F2 _]]] [R2 [L2 _]]].
    split; [|lia]. exists (e1 ++ e2). rewrite E2, E1, app_assoc. split; [reflexivity|]. apply Forall_app. split; [exact F1|].
    eapply Forall_impl; [|exact F2]. simpl. intros; lia.
Qed.

Lemma history_rounds : forall c rs, Forall (fun y => snd (fst y) < h_round (history c rs)) (h_steps (history c rs)).
Proof.
  intros. induction rs as [|x rs IH] using rev_ind; [constructor|]. rewrite history_snoc.
  destruct (h_step_grows c (history c rs) x (history_released _ _)) as [[e [E [_ [_ F]]]] [R _]]. rewrite E. apply Forall_app. split; [|exact F].
  eapply Forall_impl; [|exact IH]. simpl. intros; lia.
Qed.

Lemma history_complete : forall {h0} c rs l, h_kind (history_from h0 c rs) = NClosed Complete l ->
  l = length (h_steps (history_from h0 c rs)) /\ h_released (history_from h0 c rs) = length (h_steps (history_from h0 c rs)).
Proof.
  intros h0 c rs. unfold history_from. apply (fold_ind _ _ (h_step c) (fun h => forall l, h_kind h = NClosed Complete l -> l = length (h_steps h) /\ h_released h = length (h_steps h))).
  - rewrite o_offers. discriminate.
  - intros h x IH l. unfold h_step. destruct (h_kind h) eqn:K; destruct x; simpl; rewrite ?K; try discriminate; try (intros E; apply IH; exact E).
    + destruct (is_bad a); simpl; [discriminate|]. destruct (o_stop_rank a); simpl; [discriminate|]. destruct (target c a); [|discriminate]. intros E. injection E as <-. auto.
    + destruct (failure_of rs0) as [o|] eqn:F; simpl; [|congruence]. intros E. injection E as -> <-. exfalso. exact (failure_of_kind _ _ F).
Qed.

Section Protocol.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).

Lemma hist_order : forall h0 s r q, got s r <= got s q ->
  (exists ext, h_steps (hist_from cfg h0 s q) = h_steps (hist_from cfg h0 s r) ++ ext /\ Forall (fun y => h_round (hist_from cfg h0 s r) <= snd (fst y)) ext) /\
  h_round (hist_from cfg h0 s r) <= h_round (hist_from cfg h0 s q) /\ h_released (hist_from cfg h0 s r) <= h_released (hist_from cfg h0 s q).
Proof.
  intros h0 s r q L. unfold hist_from, seen. replace (got s q) with (got s r + (got s q - got s r)) by lia. rewrite firstn_add. apply history_grows.
Qed.

(** The history of all results extends the history of each rank. *)
Lemma whole_goes_on : forall h0 s r, (exists ext, h_steps (whole_from cfg h0 s) = h_steps (hist_from cfg h0 s r) ++ ext) /\ h_round (hist_from cfg h0 s r) <= h_round (whole_from cfg h0 s).
Proof.
  intros h0 s r. destruct (history_grows h0 (cfg 0) (skipn (got s r) (results s)) (seen s r)) as [[ext [E _]] [L _]]. unfold seen in E, L. rewrite firstn_skipn in E, L.
  split; [exists ext; exact E|exact L].
Qed.

Context {h0 : origin}.
Notation sound := (Keeps.sound W cfg depth input (h0 := h0)).
Notation hist_of := (hist_from cfg h0).
Notation whole := (whole_from cfg h0).

Lemma shared_nth : forall s r j x, sound s -> r < W -> nth_error (steps_of (rank_of s r)) j = Some x -> nth_error (h_steps (hist_of s r)) j = Some (shared x).
Proof.
  intros s r j x R H E. pose proof (g_core _ _ _ _ _ R r H) as K. rewrite <- (k_steps _ _ _ _ _ _ K). apply map_nth_error, E.
Qed.

Lemma steps_are_of_earlier_rounds : forall s r x, reachable s -> r < W -> In x (steps_of (rank_of s r)) -> s_round x < round (rank_of s r).
Proof.
  intros s r x R H Ix. pose proof (g_core _ _ _ _ _ (invariant_of W cfg depth input ok s R) r H) as K.
  pose proof (history_rounds (cfg 0) (seen s r)) as F. change (history _ _) with (hist_from cfg fresh s r) in F. rewrite <- (k_steps _ _ _ _ _ _ K), <- (k_round _ _ _ _ _ _ K) in F.
  rewrite Forall_forall in F. exact (F (shared x) (in_map shared _ _ Ix)).
Qed.

(** FEWEST: the offer of a ready rank states how many groups the rank has formed. If its source has not ended, and it forms no updates,
    the rank offers to emit all of them or all but one, and at least one. *)
Theorem a_rank_that_reads_on_offers_its_groups_or_one_fewer : forall s r o, sound s -> r < W ->
  at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) -> o_ready o = true ->
  o_groups_max o = length (groups (rank_of s r)) /\ (o_groups_min o = None <-> ended (rank_of s r) = true \/ c_updates (cfg r) <> None) /\
  forall g, o_groups_min o = Some g -> 1 <= g <= length (groups (rank_of s r)) /\ length (groups (rank_of s r)) <= S g.
Proof.
  intros s r o R H Ph Po Ro. pose proof (g_core _ _ _ _ _ R r H) as K.
  destruct (k_offer _ _ _ _ _ _ K Ph) as [o' [Po' O]]. rewrite Po in Po'. injection Po' as <-.
  destruct (of_ready _ _ _ _ O Ro) as [_ [_ [_ [_ [R5 [R6 _]]]]]]. split; [exact R5|]. split.
  - rewrite R6. destruct (ended (rank_of s r)), (c_updates (cfg r)); simpl; split; auto; try discriminate; [right; discriminate|intros [X|X]; congruence].
  - intros g Eg. rewrite <- R5. destruct ok as [_ Ok _]. eapply ready_groups_to_emit; eauto.
Qed.

Theorem rounds_are_aligned : forall s r q j x y, sound s -> r < W -> q < W ->
  nth_error (steps_of (rank_of s r)) j = Some x -> nth_error (steps_of (rank_of s q)) j = Some y ->
  s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y.
Proof.
  intros s r q j x y R Hr Hq Hx Hy. pose proof (so_invariant _ _ _ _ _ R) as I.
  assert (Nx : s_number x = j) by (eapply step_number; [apply (g_core _ _ _ _ _ I r Hr)|apply history_numbered|exact Hx]).
  assert (Ny : s_number y = j) by (eapply step_number; [apply (g_core _ _ _ _ _ I q Hq)|apply history_numbered|exact Hy]).
  apply (shared_nth s r j x R Hr) in Hx. apply (shared_nth s q j y R Hq) in Hy.
  assert (E : shared x = shared y).
  { destruct (le_ge_dec (got s r) (got s q)) as [L|L].
    - destruct (hist_order h0 s r q L) as [[ext [E _]] _]. rewrite E in Hy. rewrite nth_error_app1 in Hy by (apply nth_error_Some; congruence). congruence.
    - destruct (hist_order h0 s q r L) as [[ext [E _]] _]. rewrite E in Hx. rewrite nth_error_app1 in Hx by (apply nth_error_Some; congruence). congruence. }
  unfold shared in E. injection E as E1 E2 E3. auto.
Qed.

Definition steps_in_round (k : nat) (s : state) : list Machine.step := filter (fun x => s_round x =? k) (steps_of s).

Lemma steps_in_round_shared : forall k xs, length (filter (fun x => s_round x =? k) xs) = length (filter (fun y => snd (fst y) =? k) (map shared xs)).
Proof. induction xs as [|x xs IH]; simpl; [reflexivity|]. destruct (s_round x =? k); simpl; congruence. Qed.

Theorem every_rank_makes_the_same_number_of_steps_in_a_round : forall s r q k, sound s -> r < W -> q < W ->
  k < round (rank_of s r) -> k < round (rank_of s q) -> length (steps_in_round k (rank_of s r)) = length (steps_in_round k (rank_of s q)).
Proof.
  intros s r q k R Hr Hq Lr Lq. pose proof (so_invariant _ _ _ _ _ R) as I.
  pose proof (g_core _ _ _ _ _ I r Hr) as Kr. pose proof (g_core _ _ _ _ _ I q Hq) as Kq.
  unfold steps_in_round. rewrite !steps_in_round_shared. rewrite (k_steps _ _ _ _ _ _ Kr), (k_steps _ _ _ _ _ _ Kq).
  rewrite (k_round _ _ _ _ _ _ Kr) in Lr. rewrite (k_round _ _ _ _ _ _ Kq) in Lq.
  assert (Z : forall a b, got s a <= got s b -> k < h_round (hist_of s a) ->
    length (filter (fun y => snd (fst y) =? k) (h_steps (hist_of s a))) = length (filter (fun y => snd (fst y) =? k) (h_steps (hist_of s b)))).
  { intros a b L La. destruct (hist_order h0 s a b L) as [[ext [E F]] _]. rewrite E, filter_app, app_length.
    replace (filter (fun y => snd (fst y) =? k) ext) with (@nil shared_step); [simpl; lia|]. symmetry. clear E. induction F as [|y ext Hy F IH]; simpl; [reflexivity|].
    destruct (snd (fst y) =? k) eqn:Q; [apply Nat.eqb_eq in Q; lia|exact IH]. }
  destruct (le_ge_dec (got s r) (got s q)) as [L|L]; [apply Z; assumption|symmetry; apply Z; assumption].
Qed.

Theorem nothing_is_lost : forall s r, sound s -> r < W ->
  Permutation (samples_of (steps_of (rank_of s r)) ++ concat (aligned (rank_of s r)) ++ window (rank_of s r) ++ skipn (read (rank_of s r)) (input r)) (input r).
Proof.
  intros s r R H. pose proof (g_core _ _ _ _ _ R r H) as K. pose proof (k_cons _ _ _ _ _ _ K) as C.
  rewrite <- (firstn_skipn (read (rank_of s r)) (input r)) at 2. rewrite !app_assoc. apply Permutation_app_tail. rewrite <- app_assoc. exact C.
Qed.

Definition emitted (s : sys) (r : nat) : list sample := samples_of (taken (rank_of s r)).

(** ONCE: a position identifies a sample within a rank. *)
Theorem no_sample_is_emitted_twice : forall s r, sound s -> r < W -> NoDup (map pos (input r)) ->
  NoDup (map pos (samples_of (steps_of (rank_of s r)))) /\ NoDup (map pos (emitted s r)).
Proof.
  intros s r R H ND. pose proof (nothing_is_lost s r R H) as P. apply (Permutation_map pos) in P. symmetry in P.
  apply (Permutation_NoDup P) in ND. rewrite map_app in ND.
  apply NoDup_first in ND. split; [exact ND|]. unfold emitted, steps_of, samples_of in *. rewrite map_app, concat_app, map_app in ND. exact (NoDup_first _ _ _ ND).
Qed.

Lemma ended_current : forall s r, System.invariant W cfg depth input (h0 := h0) s -> r < W -> is_ending (rank_of s r) = true ->
  hist_of s r = whole s /\ got s r = length (log s).
Proof.
  intros s r I H E.
  destruct (hist_cases W cfg depth input s r I H) as [[G Wa]|[_ [_ [Wa _]]]]; [auto|]. unfold is_ending, is_waiting in *. destruct (at_phase (rank_of s r)); discriminate.
Qed.

Lemma ended_outcome : forall s r, System.invariant W cfg depth input (h0 := h0) s -> r < W -> is_ending (rank_of s r) = true ->
  exists o l, h_kind (whole s) = NClosed o l /\ ended_as (rank_of s r) = Some o.
Proof.
  intros s r I H E. destruct (ended_current s r I H E) as [<- _]. pose proof (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I r H)) as K.
  unfold kind_ok in K. unfold is_ending in E. destruct (at_phase (rank_of s r)); try discriminate; exact K.
Qed.

(** Every sample of rank [i]'s input is in exactly one of its steps. *)
Definition has_planned_everything (s : sys) (i : nat) : Prop := Permutation (samples_of (steps_of (rank_of s i))) (input i).

Lemma closed_not_counting : forall s i o l, sound s -> i < W -> h_kind (whole s) = NClosed o l -> at_phase (rank_of s i) <> COUNT.
Proof.
  intros s i o l R H Hk Ph. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I i H)) as K. unfold kind_ok in K. rewrite Ph in K.
  assert (K' : exists t, h_kind (hist_of s i) = NCount t) by (first [exact K|destruct K as [? K]; eauto|eauto]). destruct K' as [t K'].
  destruct (hist_cases W cfg depth input s i I H) as [[_ Wa]|[_ [_ [_ [ms [x [_ [_ Wa]]]]]]]]; [congruence|].
  rewrite Wa in Hk. unfold h_step in Hk. rewrite K' in Hk. destruct x; simpl in Hk; congruence.
Qed.

Lemma dry_has_planned : forall s i o l, sound s -> i < W -> h_kind (whole s) = NClosed o l -> dry s i -> has_planned_everything s i.
Proof.
  intros s i o l R H Hk [D1 [D2 D3]]. pose proof (g_core _ _ _ _ _ R i H) as K.
  assert (Rd : read (rank_of s i) = length (input i)) by (destruct (k_ended _ _ _ _ _ _ K D3) as [X _]; lia).
  pose proof (k_cons _ _ _ _ _ _ K) as C. rewrite D1, Rd, firstn_all, (k_aligned _ _ _ _ _ _ K) in C by (apply (closed_not_counting s i o l R H Hk)).
  simpl in C. rewrite app_nil_r in C. exact C.
Qed.

Theorem a_complete_rank_has_planned_its_whole_input : forall s r, sound s -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete -> has_planned_everything s r.
Proof.
  intros s r R H Jm Nq En O. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S.
  destruct (ended_outcome s r I H En) as [o [l [Hk O']]]. rewrite O in O'. injection O' as <-. apply (dry_has_planned s r Complete l R H Hk).
  destruct (n_closed _ _ _ S l Hk) as [Q|[[Q _]|Q]]; [|congruence|apply Q, H]. unfold quota_met, is_quota_met in Q. rewrite Nq in Q. discriminate.
Qed.

Lemma a_complete_rank_has_read_its_whole_input : forall s r, sound s -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete -> ended (rank_of s r) = true.
Proof.
  intros s r R H Jm Nq En O. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S.
  destruct (ended_outcome s r I H En) as [o [l [Hk O']]]. rewrite O in O'. injection O' as <-.
  destruct (n_closed _ _ _ S l Hk) as [Q|[[Q _]|Q]]; [unfold quota_met, is_quota_met in Q; rewrite Nq in Q; discriminate|congruence|]. apply (Q r H).
Qed.

Theorem join_mode_covers : forall s r, sound s -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  at_phase (rank_of s r) = DONE -> ended_as (rank_of s r) = Some Complete -> stopped (rank_of s r) = false ->
  Permutation (samples_of (taken (rank_of s r) ++ queue (rank_of s r))) (input r).
Proof.
  intros s r R H Jm Nq P O St. pose proof (so_invariant _ _ _ _ _ R) as I.
  assert (En : is_ending (rank_of s r) = true) by (unfold is_ending; rewrite P; reflexivity).
  pose proof (a_complete_rank_has_planned_its_whole_input s r R H Jm Nq En O) as C.
  destruct (ended_current s r I H En) as [Wh _]. destruct (ended_outcome s r I H En) as [o [l [Hk O']]]. rewrite O in O'. injection O' as <-.
  pose proof (g_core _ _ _ _ _ I r H) as K. rewrite Wh in K.
  destruct (history_complete (cfg 0) (results s) l Hk) as [Hl Hr].
  pose proof (k_steps _ _ _ _ _ _ K) as Ks. apply (f_equal (@length shared_step)) in Ks. rewrite map_length in Ks.
  pose proof (k_released _ _ _ _ _ _ K) as Kr. fold (whole s) in Hr, Hl. rewrite Hr, <- Ks in Kr. unfold has_planned_everything, steps_of, released_of in *. rewrite !app_length in *.
  assert (Pl : plan (rank_of s r) = []) by (destruct (plan (rank_of s r)); [reflexivity|simpl in *; lia]).
  assert (Ob : released (rank_of s r) = []).
  { destruct (t_done _ _ (g_tight _ _ _ _ _ I r H) P) as [X|[l' [X1 X2]]]; [exact X|]. rewrite (k_free _ _ _ _ _ _ K St), Hk in X1. injection X1 as <-.
    destruct (released (rank_of s r)); [reflexivity|]. simpl in *. lia. }
  rewrite Pl, Ob, !app_nil_r in C. exact C.
Qed.

Theorem release_needs_every_rank_ready : forall s r q j, sound s -> r < W -> q < W -> j < length (released_of (rank_of s r)) ->
  j < length (released_of (rank_of s q)) \/ (j < length (steps_of (rank_of s q)) /\ collated (rank_of s q) = true).
Proof.
  intros s r q j R Hr Hq L. pose proof (so_invariant _ _ _ _ _ R) as I.
  pose proof (g_core _ _ _ _ _ I r Hr) as Kr. pose proof (g_core _ _ _ _ _ I q Hq) as Kq.
  rewrite (k_released _ _ _ _ _ _ Kr) in L. rewrite (k_released _ _ _ _ _ _ Kq).
  destruct (le_lt_dec (got s r) (got s q)) as [G|G]; [left; destruct (hist_order h0 s r q G) as [_ [_ X]]; lia|].
  destruct (hist_cases W cfg depth input s r I Hr) as [[Gr Wr]|[_ [Gr _]]].
  2:{ destruct (hist_cases W cfg depth input s q I Hq) as [[Gq _]|[_ [Gq _]]]; lia. }
  destruct (hist_cases W cfg depth input s q I Hq) as [[Gq _]|[_ [Gq [Wa [ms [x [El [Em Ew]]]]]]]]; [lia|].
  rewrite Wr, Ew in L. unfold h_step in L. destruct (h_kind (hist_of s q)) eqn:K; destruct x as [a|cs|rs]; simpl in L; auto;
    try (destruct (failure_of rs); simpl in L; auto; fail).
  destruct (is_bad a) eqn:B; simpl in L; [left; exact L|]. destruct (o_stop_rank a) eqn:Sr; simpl in L; [left; exact L|]. right.
  pose proof (log_entry W cfg depth input s _ _ I El) as [EL [ER EM]]. simpl in *. destruct (reduce_is _ _ ER) as [os [-> [A _]]].
  assert (Ra : o_ready a = true).
  { apply (all_were_ready a os A B Sr). intros o Ho Ro. apply In_nth_error in Ho as [i Hi]. destruct (EM i _ (map_nth_error MOffer _ _ Hi)) as [_ [_ [_ [Fl _]]]]. exact (Fl Ro). }
  pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ Kq)) as Ph. rewrite K in Ph. unfold is_waiting in Wa. destruct Ph as [Ph|Ph]; [rewrite Ph in Wa; discriminate|].
  destruct (k_offer _ _ _ _ _ _ Kq Ph) as [o [Po O]]. unfold message in Em. rewrite Po in Em. apply nth_error_In in Em. apply in_map_iff in Em as [o' [Eo Io]]. injection Eo as ->.
  destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [C _]. split; [|exact C]. rewrite <- (map_length shared), (k_steps _ _ _ _ _ _ Kq). exact L.
Qed.

Theorem global_counts_are_the_sums_over_all_ranks : forall s r j x, sound s -> r < W -> nth_error (steps_of (rank_of s r)) j = Some x ->
  s_counts x = sum_counts (map (fun q => count_group (nth j (groups_of (rank_of s q)) [])) (seq 0 W)).
Proof.
  intros s r j x R H E. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S. apply (shared_nth s r j x R H) in E.
  destruct (whole_goes_on h0 s r) as [[ext X] _]. apply (n_true _ _ _ S j (shared x)). rewrite X, nth_error_app1 by (apply nth_error_Some; congruence). exact E.
Qed.

Theorem a_resource_is_counted_where_some_rank_uses_it : forall s r j x i, sound s -> r < W -> nth_error (steps_of (rank_of s r)) j = Some x ->
  (0 < nth i (n_costs (s_counts x)) 0 <-> exists q, q < W /\ 0 < used i (nth j (groups_of (rank_of s q)) [])).
Proof.
  intros s r j x i R H E. rewrite (global_counts_are_the_sums_over_all_ranks s r j x R H E). unfold sum_counts. rewrite (fold_add (fun c => nth i (n_costs c) 0)), sum_over_map by (intros; apply nth_add_costs).
  replace (nth i (n_costs zero_counts) 0) with 0 by (destruct i; reflexivity). simpl.
  rewrite (sum_over_ext _ _ (fun q => used i (nth j (groups_of (rank_of s q)) []))), sum_over_positive by (intros q; apply nth_costs_of_group). split.
  - intros [q [Hq P]]. apply in_seq in Hq. exists q. split; [lia|exact P].
  - intros [q [Hq P]]. exists q. split; [apply in_seq; lia|exact P].
Qed.

Theorem some_rank_has_work_in_every_step : forall s r x, sound s -> r < W -> In x (steps_of (rank_of s r)) -> 1 <= n_samples (s_counts x).
Proof.
  intros s r x R H E. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S. apply In_nth_error in E as [j E]. apply (shared_nth s r j x R H) in E.
  pose proof (n_work _ _ _ S) as F. rewrite Forall_forall in F. apply (F (shared x)).
  destruct (whole_goes_on h0 s r) as [[ext ->] _]. apply in_or_app. left. exact (nth_error_In _ _ E).
Qed.

Definition samples_by (n : nat) (s : state) : nat := sum_over (fun x => n_samples (s_counts x)) (firstn n (steps_of s)).

(** QUOTA: if a rank closes COMPLETE, all ranks that end have made the same steps. With a quota, these are the first whose samples reach it,
    unless some rank has planned its whole input first. Without a quota, some rank has planned its whole input. *)
Definition closes_in_time (s : sys) (r : nat) : Prop :=
  let steps := length (steps_of (rank_of s r)) in
  let some_rank_is_dry := exists i, i < W /\ has_planned_everything s i in
  match c_quota (cfg 0) with
  | Some quota => (forall n, 0 < n < steps -> samples_by n (rank_of s r) < quota) /\ (quota <= samples_by steps (rank_of s r) \/ some_rank_is_dry)
  | None => some_rank_is_dry
  end.

Theorem quota_ranks_close_at_the_same_first_step : forall s r q, sound s -> r < W -> q < W ->
  is_ending (rank_of s r) = true -> is_ending (rank_of s q) = true -> ended_as (rank_of s r) = Some Complete ->
  ended_as (rank_of s q) = Some Complete /\ length (steps_of (rank_of s q)) = length (steps_of (rank_of s r)) /\ closes_in_time s r.
Proof.
  intros s r q R Hr Hq Er Eq O. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S.
  destruct (ended_current s r I Hr Er) as [Wr _]. destruct (ended_current s q I Hq Eq) as [Wq _].
  destruct (ended_outcome s r I Hr Er) as [o [l [Hk O1]]]. destruct (ended_outcome s q I Hq Eq) as [o2 [l2 [Hk2 O2]]].
  rewrite O in O1. injection O1 as <-. rewrite Hk in Hk2. injection Hk2 as <- <-.
  pose proof (g_core _ _ _ _ _ I r Hr) as Kr. pose proof (g_core _ _ _ _ _ I q Hq) as Kq. rewrite Wr in Kr. rewrite Wq in Kq.
  pose proof (k_steps _ _ _ _ _ _ Kr) as Sr. pose proof (k_steps _ _ _ _ _ _ Kq) as Sq.
  assert (Lr : length (steps_of (rank_of s r)) = length (h_steps (whole s))) by (rewrite <- Sr, map_length; reflexivity).
  assert (Lq : length (steps_of (rank_of s q)) = length (h_steps (whole s))) by (rewrite <- Sq, map_length; reflexivity).
  assert (X : forall n, samples_by n (rank_of s r) = planned_samples (whole s) n).
  { intros n. unfold samples_by, planned_samples. rewrite <- Sr, firstn_map, sum_over_map. reflexivity. }
  split; [exact O2|]. split; [congruence|].
  assert (Cl : quota_met cfg (whole s) = true \/ exists i, i < W /\ has_planned_everything s i).
  { destruct (n_closed _ _ _ S l Hk) as [Q|[[_ [i [Hi Q]]]|Q]]; [left; exact Q|right; exists i|right; exists r]; (split; [assumption|]); eapply dry_has_planned; eauto. }
  unfold closes_in_time. unfold quota_met, is_quota_met in Cl. destruct (c_quota (cfg 0)) as [quota|] eqn:Qt; [split|].
  - intros n Hn. rewrite X. rewrite Lr in Hn. destruct (n_first _ _ _ S n) as [Z|Z]; [lia|lia|]. unfold is_quota_met in Z. rewrite Qt in Z. apply Nat.leb_gt in Z. exact Z.
  - destruct Cl as [Q|Q]; [left|right; exact Q]. apply Nat.leb_le in Q. rewrite X, Lr. unfold planned_samples. rewrite firstn_all. exact Q.
  - destruct Cl as [Q|Q]; [discriminate|exact Q].
Qed.

(** An agreement makes a step if the round forms any. *)
Lemma a_round_that_forms_steps_has_one : forall s i a n, sound s -> i < W -> may cfg input s i (Got (Agreed a)) -> at_phase (rank_of s i) = OFFER ->
  is_bad a = false -> o_stop_rank a = None -> target (cfg i) a = Makes n -> has_steps (cfg i) (round (rank_of s i)) = true -> 1 <= n.
Proof.
  intros s i a n R H M Ph B Sr Tg Hs. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (so_second _ _ _ _ _ R) as S.
  destruct (got_current W cfg depth input s i _ I H M) as [_ [_ [Wh [ms [El _]]]]]. pose proof (g_core _ _ _ _ _ I i H) as K.
  pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. rewrite Ph in Kk.
  rewrite (good_agreement W cfg (some_rank _ _ ok) (prints_differ _ _ ok) _ _ i (log_entry W cfg depth input s _ _ I El) B H) in Tg, Hs.
  unfold h_step in Wh. rewrite Kk, B, Sr, Tg in Wh. pose proof (n_count _ _ _ S n) as Nc. rewrite Wh in Nc. cbn [h_kind h_round] in Nc.
  rewrite <- (k_round _ _ _ _ _ _ K), Hs in Nc. destruct (Nc eq_refl) as [_ [[_ F]|[L _]]]; [discriminate|exact L].
Qed.

Theorem quota_mode_never_idles : forall s r, reachable s -> r < W -> (forall i, i < W -> c_is_quota (cfg i) = true /\ c_updates (cfg i) = None) ->
  Forall (fun g => g <> []) (groups_of (rank_of s r)).
Proof.
  intros s r R H Qm. revert s R r H. apply (each_rank_always W cfg depth input ok (fun _ _ u => Forall (fun g => g <> []) (groups_of u))).
  - constructor.
  - intros s i e t R H M NG E IH. pose proof (transition_same _ _ _ _ _ _ NG E) as X. unfold groups_of. rewrite (sa_steps _ _ X), (sa_aligned _ _ X). exact IH.
  - intros s i y t R H M E IH. pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I i H) as K.
    simpl in E. destruct y as [a|cs|rs]; destruct (at_phase (rank_of s i)) eqn:P; try discriminate.
    + destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]]. unfold groups_of in *. rewrite S1. apply Forall_app in IH as [IH1 IH2]. apply Forall_app. split; [exact IH1|].
      destruct C as [_ P2 _ _|? _ _ P2 _|_ _ _ _ P2 _|n _ _ Ra Tg _ _ Al _];
        try (destruct S2 as [S2 _]; [first [congruence|destruct P2; congruence]|rewrite S2; exact IH2]).
      rewrite Al. destruct (answered_offer W cfg depth input s i a I H M P) as [o [os [A [Io [Po O]]]]].
      destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [R2 [R3 [R4 _]]]]. destruct (ag_samples _ _ A o Io) as [Mi _]. rewrite (of_samples _ _ _ _ O), R4 in Mi.
      unfold align_at. destruct (has_steps (cfg i) (round (rank_of s i))) eqn:Hs; [|constructor]. rewrite (held_is_window _ _ _ _ _ _ (configs_ok _ _ ok i H) K P R2 R3 Hs) in Mi.
      unfold groups_at in R3. rewrite Hs in R3. destruct (target_makes _ _ _ Tg) as [_ [_ En]]. destruct (Qm i H) as [Qi Ui]. rewrite (proj2 (proj2 (proj2 (without_updates _ Ui)))), Qi in En.
      apply (ok_align_work _ (configs_ok _ _ ok i H)); [rewrite R3; apply (ok_group_nonempty _ (configs_ok _ _ ok i H))|].
      rewrite R3, (Permutation_length (ok_group_perm _ (configs_ok _ _ ok i H) _ _)). destruct (is_quota_met _ _); lia.
    + destruct (count_cases _ _ _ _ _ E) as [_ [Al [_ [_ [_ S1]]]]]. destruct (S1 (k_plan _ _ _ _ _ _ K P)) as [new [S2 [S3 _]]].
      unfold groups_of in *. rewrite Al, app_nil_r, S2, map_app, S3. apply Forall_app in IH as [IH1 IH2]. apply Forall_app. split; [exact IH1|apply Forall_firstn, IH2].
    + destruct (failure_of rs); [|discriminate]. injection E as <-. unfold groups_of. rewrite drain_steps. exact IH.
  - auto.
Qed.

End Protocol.
