(** Every transition of a rank keeps its invariant. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local.
Import ListNotations.

Definition next_hist (c0 : config) (h : hist) (e : event) : hist := match e with Got x => h_step c0 h x | _ => h end.

(** What the environment guarantees: samples come from the source in order, and an agreement includes this rank's own offer. *)
Definition admissible (c c0 : config) (inp : list sample) (s : state) (e : event) : Prop :=
  match e with
  | SamplesRead xs en _ => xs = firstn (length xs) (skipn (read s) inp) /\ (en = true -> read s + length xs = length inp)
  | Got (Counted _) => c_shares c = true -> has_more c s
  | Got (Agreed a) => (is_bad a = false -> c = c0) /\
      (o_ready a = true -> forall o, posted s = Some (MOffer o) -> o_ready o = true)
  | _ => True
  end.

Lemma make_steps_shared : forall gs cs n rd, length gs <= length cs ->
  map shared (make_steps n rd gs cs) = make_shared n rd (firstn (length gs) cs).
Proof.
  induction gs as [|g gs IH]; intros cs n rd L; simpl; [reflexivity|]. destruct cs as [|x cs]; simpl in *; [lia|].
  unfold shared at 1. simpl. rewrite IH by lia. reflexivity.
Qed.

Lemma make_steps_groups : forall gs cs n rd, length gs <= length cs -> map s_group (make_steps n rd gs cs) = gs.
Proof.
  induction gs as [|g gs IH]; intros cs n rd L; simpl; [reflexivity|]. destruct cs as [|x cs]; simpl in *; [lia|]. rewrite IH by lia. reflexivity.
Qed.

Lemma cut_le : forall c g cs, cut c g cs <= length cs.
Proof.
  intros c g cs. unfold cut. destruct (c_quota c) as [q|]; [|lia]. revert g. induction cs as [|x cs IH]; simpl; intros g; [lia|]. specialize (IH (g + n_samples x)). destruct (_ <=? _); lia.
Qed.

Lemma cut_pos : forall c g cs, cs <> [] -> 1 <= cut c g cs.
Proof. intros c g cs NE. destruct cs as [|x cs]; [easy|]. unfold cut. destruct (c_quota c); simpl; [destruct (_ <=? _)|]; lia. Qed.

Lemma make_shared_samples : forall cs n rd, sum_over (fun x : shared_step => n_samples (snd x)) (make_shared n rd cs) = total_samples cs.
Proof. induction cs; simpl; intros; [reflexivity|]. rewrite IHcs. reflexivity. Qed.

(** ** The steps of a round *)

Lemma target_makes : forall c a n, target c a = Makes n -> o_samples_max a <> 0 /\ (c_is_quota c = true -> o_samples_min a <> 0) /\ n = count_steps c a.
Proof.
  intros c a n T. unfold target, is_closing in T. destruct (Nat.eqb_spec (o_samples_max a) 0), (c_is_quota c), (Nat.eqb_spec (o_samples_min a) 0); simpl in T;
    try discriminate; injection T as <-; repeat split; auto; discriminate.
Qed.

Lemma target_closes : forall c a, target c a = Closes -> o_samples_max a = 0 \/ c_is_quota c = true /\ o_samples_min a = 0.
Proof.
  intros c a T. unfold target, is_closing in T. destruct (Nat.eqb_spec (o_samples_max a) 0), (c_is_quota c), (Nat.eqb_spec (o_samples_min a) 0); simpl in T; auto; discriminate.
Qed.

Lemma target_within_bounds : forall c a n, within_bounds (c_rule c) -> target c a = Makes n -> has_steps c (o_round_min a) = true -> sane a -> 1 <= n <= o_samples_max a.
Proof.
  intros c a n B T Hs Sa. destruct (target_makes c a n T) as [_ [Mi ->]]. unfold count_steps. rewrite Hs. pose proof (B a Sa). pose proof (sane_groups a Sa).
  destruct (c_updates c); simpl; [lia|]. destruct (c_is_quota c); [specialize (Mi eq_refl)|]; lia.
Qed.

Lemma no_steps_unless_formed : forall c a n k, target c a = Makes n -> o_round_min a = k -> has_steps c k = false -> n = 0.
Proof.
  intros c a n k T <- F. destruct (target_makes c a n T) as [_ [_ ->]]. unfold count_steps. rewrite F. destruct (c_updates c) eqn:U; [reflexivity|].
  unfold has_steps, update_rounds in F. rewrite U, Nat.mod_1_r in F. discriminate.
Qed.

Lemma formed_length : forall c, config_ok c -> forall s n, (has_steps c (round s) = false -> n = 0) -> length (fst (form_steps c s n)) = n.
Proof. intros c OK s n Z. unfold align_at. destruct (has_steps c (round s)); [apply (ok_align_length c OK)|rewrite Z; reflexivity]. Qed.

Lemma formed_perm : forall c, config_ok c -> forall s n, groups s = form_groups c s ->
  Permutation (concat (fst (form_steps c s n)) ++ snd (form_steps c s n)) (window s).
Proof.
  intros c OK s n G. unfold align_at, groups_at in *. destruct (has_steps c (round s)); [|reflexivity].
  rewrite (ok_align_perm c OK), G. apply (ok_group_perm c OK).
Qed.

Lemma without_updates : forall c, c_updates c = None -> (forall k, has_steps c k = true) /\
  (forall s, form_groups c s = c_group c (budget s) (window s)) /\ (forall s n, form_steps c s n = c_align c (round s) (groups s) n (due_before c s)) /\
  (forall a, count_steps c a = if c_is_quota c then Nat.min (c_rule c a) (o_samples_min a) else c_rule c a).
Proof.
  intros c U. assert (A : forall k, has_steps c k = true) by (intros k; unfold has_steps, update_rounds; rewrite U, Nat.mod_1_r; reflexivity).
  unfold groups_at, align_at, count_steps. rewrite U. split; [exact A|]. split; [intros; rewrite A; reflexivity|]. split; [intros; rewrite A; reflexivity|reflexivity].
Qed.

Section Events.
Variables (c c0 : config) (rank depth : nat) (inp : list sample) (h : hist).
Hypothesis OK : config_ok c.
Hypothesis NUM : numbered_from 0 (h_steps h).
Notation core := (core c c0 rank inp).

Notation loose := (loose depth).

Lemma tight_loose : forall s, tight depth s -> loose s.
Proof. intros s T. destruct T. split; assumption. Qed.

(** After any change to a rank that is not ending, whether it posts or not. *)
Lemma after_post : forall s, at_phase s <> DRAIN -> at_phase s <> DONE -> core h s -> loose s ->
  core h (post c rank s) /\ tight depth (post c rank s).
Proof. intros s P1 P2 K L. split; [apply post_core, K|apply post_tight; assumption]. Qed.

Lemma post_ending : forall s, at_phase s = DRAIN \/ at_phase s = DONE -> post c rank s = s.
Proof. intros s P. destruct (post_eq c rank s) as [[E _]|[F _]]; [exact E|]. destruct P; congruence. Qed.

(** A change of input or flags has no further effect on a rank that is ending. *)
Lemma after_post_any : forall s t, tight depth s -> core h t ->
  at_phase t = at_phase s -> queue t = queue s -> released t = released s -> taken t = taken s -> limit t = limit s ->
  core h (post c rank t) /\ tight depth (post c rank t).
Proof.
  intros s t T K P Q O Tk L.
  assert (X : (at_phase t = DRAIN \/ at_phase t = DONE) \/ (at_phase t <> DRAIN /\ at_phase t <> DONE)).
  { destruct (at_phase t); auto; right; split; discriminate. }
  destruct X as [X|[X1 X2]].
  - rewrite post_ending by assumption. split; [assumption|]. destruct T. constructor; rewrite ?P, ?Q, ?O, ?Tk, ?L; auto.
    intros F. exfalso. rewrite P in X. destruct X as [X|X]; rewrite X in F; discriminate.
  - apply after_post; auto. destruct T. split; rewrite ?Q, ?O, ?Tk, ?L; auto.
Qed.

Lemma settled : forall t, core h t -> loose t ->
  (at_phase t = DONE -> released t = [] \/ exists l, limit t = Some l /\ l <= length (taken t) + length (queue t)) ->
  core h (post c rank (finish_when_drained t)) /\ tight depth (post c rank (finish_when_drained t)).
Proof.
  intros t K L D. destruct (at_phase t) eqn:P; [| | | |rewrite post_ending by (destruct (finish_eq t) as [p [-> [-> | ->]]]; auto)|].
  5:{ split; [apply finish_core; assumption|]. eapply finish_tight; eauto. }
  5:{ rewrite finish_other, post_ending by (auto; congruence). split; [exact K|]. destruct L. constructor; rewrite ?P; auto; discriminate. }
  all: rewrite finish_other by congruence; apply after_post; [congruence|congruence|exact K|exact L].
Qed.

(** After a read, a collation, a failure or an urge, before the rank may post. *)
Lemma moved_core : forall s e, core h s -> granted s e -> admissible c c0 inp s e -> e <> StepTaken -> e <> ConsumerStopped -> core h (moved depth s e).
Proof.
  intros s e K G A N1 N2. destruct e as [xs en full| |x| | |cause|]; simpl in G, A; try contradiction; destruct K; constructor; simpl; auto;
    try (intros P; destruct (k_offer P) as [o [Po Oo]]; exists o; split; [exact Po|]; destruct Oo; constructor; simpl; auto).
  - destruct A as [X _]. rewrite firstn_add, <- X. rewrite !app_assoc. apply Permutation_app_tail. rewrite <- app_assoc. assumption.
  - destruct A as [X _]. assert (length xs <= length (skipn (read s) inp)) by (rewrite X; rewrite firstn_length; lia). rewrite skipn_length in H. lia.
  - destruct G as [_ [L [Fu _]]], A as [_ E]. intros En. destruct en; [rewrite (E eq_refl); simpl; auto|]. rewrite orb_false_r in En. destruct (k_ended En) as [X1 X2].
    destruct full; simpl; [specialize (Fu eq_refl); unfold may_be_full in Fu; rewrite En in Fu; discriminate|]. split; [lia|]. intros Sh. specialize (X2 Sh). lia.
  - destruct G as [_ [L [Fu _]]]. destruct k_window as [[F|[F|F]]|F]; [left; left; simpl; rewrite F; reflexivity| |left; right; right; exact F|right; exact F].
    destruct en; [left; left; apply orb_true_r|]. left. right. left. destruct full; simpl.
    + specialize (Fu eq_refl). unfold may_be_full in Fu. apply andb_prop in Fu as [_ Fu]. destruct (window s ++ xs); [discriminate|simpl; lia].
    + rewrite app_length. lia.
  - destruct G as [Wa _]. intros R. apply of_ready in R. destruct R as [_ [R _]]. contradiction.
  - intros R. apply of_ready in R. destruct R as [R _]. congruence.
  - intros r R. apply of_failed in R. split; [apply R|discriminate].
Qed.

Lemma stopped_core : forall s, core h s ->
  core h (set_limit (Some (match limit s with Some m => Nat.min m (length (taken s)) | None => length (taken s) end)) (set_stopped true s)).
Proof.
  intros s K. pose proof K as K'. destruct K. constructor; simpl; auto; try discriminate.
  - intros _. eexists. split; [reflexivity|]. destruct (limit s); lia.
  - intros P; destruct (k_offer P) as [o [Po Oo]]; exists o; split; [exact Po|]; destruct Oo; constructor; simpl; auto.
    intros r R. apply of_stop in R. split; [apply R|reflexivity].
Qed.

Lemma taken_core : forall s x q, core h s -> queue s = x :: q -> core h (set_taken (taken s ++ [x]) (set_queue q s)).
Proof.
  intros s x q K Q.
  assert (S1 : steps_of (set_taken (taken s ++ [x]) (set_queue q s)) = steps_of s) by (unfold steps_of; simpl; rewrite Q, <- app_assoc; reflexivity).
  assert (S2 : released_of (set_taken (taken s ++ [x]) (set_queue q s)) = released_of s) by (unfold released_of; simpl; rewrite Q, <- app_assoc; reflexivity).
  destruct K. constructor; rewrite ?S1, ?S2; simpl; auto.
  - intros E. destruct (k_stop E) as [l [L1 L2]]. exists l. split; [exact L1|]. rewrite app_length. lia.
  - intros P; destruct (k_offer P) as [o [Po Oo]]; exists o; split; [exact Po|]; destruct Oo; constructor; simpl; auto.
Qed.

(** Once the outcome is known: shared by all three ways to an end. *)
Lemma drained : forall h' s, numbered_from 0 (h_steps h') -> core h' s -> at_phase s = DRAIN -> length (queue s) <= depth ->
  core h' (finish_when_drained (deliver depth s)) /\ tight depth (finish_when_drained (deliver depth s)).
Proof.
  intros h' s Na K P Q. pose proof (deliver_core _ _ _ _ _ depth _ K) as K2.
  pose proof (deliver_loose _ _ _ _ _ depth _ K Na Q) as L2.
  assert (P2 : at_phase (deliver depth s) = DRAIN) by (destruct (deliver_eq depth s) as [d [e [_ [-> _]]]]; exact P).
  split; [apply finish_core; assumption|]. eapply finish_tight; eauto.
Qed.

Lemma drain_entry : forall gs s h' o lim,
  core h s -> loose s -> at_phase s <> COUNT -> (forall o' l', h_kind h <> NClosed o' l') ->
  h_kind h' = NClosed o lim -> h_round h' = h_round h -> h_steps h' = h_steps h ->
  h_released h' = length (released_of s) -> aligned s = [] ->
  core h' (drain depth o lim (set_groups gs s)) /\ tight depth (drain depth o lim (set_groups gs s)).
Proof.
  intros gs s h' o lim K L NP NC Hk Hr Hs Hl Al. unfold drain.
  apply drained; [rewrite Hs; assumption| |reflexivity|destruct L; assumption].
  destruct K. constructor; simpl; auto; try discriminate; try (rewrite ?Hr, ?Hs; assumption).
  - unfold kind_ok. simpl. eauto.
  - rewrite k_gsum. unfold h_samples. rewrite Hs. reflexivity.
  - destruct k_window as [X|[X _]]; [left; apply (more_stays c s); auto; unfold in_count; destruct (at_phase s); try reflexivity; contradiction|contradiction].
  - intros E. destruct (k_stop E) as [l [L1 L2]]. rewrite L1. eexists. split; [reflexivity|]. lia.
  - intros E. rewrite Hk. rewrite (k_free E). destruct (h_kind h) eqn:G; try reflexivity. exfalso. eapply NC. reflexivity.
Qed.

Lemma agree_keeps : forall s a t, core h s -> tight depth s -> at_phase s = OFFER ->
  (is_bad a = false -> c = c0) -> (o_ready a = true -> forall o, posted s = Some (MOffer o) -> o_ready o = true) ->
  agree c rank depth a s = Some t -> core (h_step c0 h (Agreed a)) t /\ tight depth t.
Proof.
  intros s a t K T P C R E. assert (L : loose s) by (apply tight_loose, T).
  assert (Hk : h_kind h = NOffer) by (pose proof (k_kind _ _ _ _ _ _ K) as X; unfold kind_ok in X; rewrite P in X; exact X).
  assert (Al : aligned s = []) by (apply (k_aligned _ _ _ _ _ _ K); rewrite P; discriminate).
  unfold agree in E. unfold h_step. rewrite Hk. destruct (is_bad a) eqn:B.
  - injection E as <-. split.
    + destruct K. constructor; simpl; auto; try discriminate.
      * unfold kind_ok. reflexivity.
      * destruct k_window as [X|[X _]]; [left; apply (more_stays c s); auto; unfold in_count; rewrite P; reflexivity|congruence].
      * intros St. specialize (k_free St). rewrite Hk in k_free. exact k_free.
      * intros _. eexists. split; [reflexivity|]. split; reflexivity.
    + destruct T. constructor; simpl; auto; discriminate.
  - specialize (C eq_refl). destruct (o_round_min a =? round s) eqn:Rd; [|discriminate]. apply Nat.eqb_eq in Rd. cbv iota beta delta [negb] in E.
    destruct (o_stop_rank a) as [r|] eqn:Sr.
    + injection E as <-. apply drain_entry; simpl; auto.
      * congruence.
      * rewrite Hk. intros ? ? ?; discriminate.
      * symmetry. apply (k_released _ _ _ _ _ _ K).
    + destruct (o_ready a) eqn:Ra; simpl in E; [|discriminate].
      destruct (k_offer _ _ _ _ _ _ K P) as [o [Po Oo]]. specialize (R eq_refl o Po).
      destruct (of_ready _ _ _ _ Oo R) as [R1 [R2 [R3 _]]].
      set (rel := set_released (released s ++ plan s) (set_plan [] (set_groups [] s))) in *.
      assert (S1 : steps_of rel = steps_of s) by (unfold steps_of, rel; simpl; rewrite app_nil_r; reflexivity).
      assert (S2 : released_of rel = steps_of s) by reflexivity.
      assert (S3 : length (steps_of s) = length (h_steps h)) by (rewrite <- (k_steps _ _ _ _ _ _ K), map_length; reflexivity).
      replace (target c0 a) with (target c a) by (rewrite C; reflexivity). destruct (target c a) as [|n] eqn:Tg.
      * injection E as <-. unfold drain.
        assert (X : core (mkHist (NClosed Complete (length (h_steps h))) (h_round h) (h_steps h) (length (h_steps h)))
                    (set_phase DRAIN (set_outcome (Some Complete) (set_limit (Some (match limit rel with Some m => Nat.min (planned s) m | None => planned s end)) rel)))).
        { destruct K. constructor; simpl; auto; try discriminate.
          - unfold kind_ok. simpl. eauto.
          - unfold steps_of. simpl. rewrite app_nil_r. exact k_steps.
          - unfold steps_of. simpl. rewrite app_nil_r. exact k_cons.
          - destruct k_window as [X|[X _]]; [left; apply (more_stays c s); auto; unfold in_count; rewrite P; reflexivity|congruence].
          - intros St. destruct (k_stop St) as [l [L1 L2]]. rewrite L1. eexists. split; [reflexivity|]. lia.
          - intros St. rewrite (k_free St), Hk. rewrite k_planned. reflexivity. }
        apply drained; [exact NUM|exact X|reflexivity|destruct L; assumption].
      * pose proof (formed_length c OK s n (no_steps_unless_formed _ _ _ _ Tg Rd)) as A1. pose proof (formed_perm c OK s n R3) as A2.
        destruct (form_steps c s n) as [al carried] eqn:Ea. injection E as <-. simpl in A1, A2.
        match goal with |- _ (deliver depth ?u) /\ _ => set (u0 := u) end.
        assert (X : core (mkHist (NCount n) (h_round h) (h_steps h) (length (h_steps h))) u0).
        { pose proof K as K'. destruct K. unfold u0, rel. constructor; simpl; auto; try discriminate.
          - unfold kind_ok. simpl. rewrite A1. auto.
          - unfold steps_of. simpl. rewrite app_nil_r. exact k_steps.
          - unfold steps_of. simpl. rewrite app_nil_r. fold (steps_of s).
            rewrite Al in k_cons. simpl in k_cons. rewrite <- k_cons. apply Permutation_app_head. exact A2.
          - intros En. rewrite En. destruct (k_ended En) as [X _]. rewrite R2 in X. auto.
          - intros F. exfalso. apply F. reflexivity.
          - destruct (c_shares c) eqn:Sh; [auto|]. left. unfold has_more, coming, in_count. simpl. destruct (ended s); [auto|]. right. rewrite Nat.add_1_r.
            destruct (has_steps c (S (round s))) eqn:Hs; [left; pose proof (ok_window c OK rank _ Hs); simpl; lia|auto].
          - intros St. rewrite (k_free St), Hk. reflexivity. }
        split; [apply deliver_core, X|].
        assert (Q : length (queue u0) <= depth) by (destruct L; assumption).
        destruct (deliver_loose _ _ _ _ _ depth _ X NUM Q) as [Q2 O2].
        assert (P2 : at_phase (deliver depth u0) = COUNT) by (destruct (deliver_eq depth u0) as [d [e [_ [-> _]]]]; reflexivity).
        constructor; auto; rewrite P2; discriminate.
Qed.

Lemma count_keeps : forall s cs t, core h s -> tight depth s -> at_phase s = COUNT -> (c_shares c = true -> has_more c s) ->
  count c rank cs s = Some t -> core (h_step c0 h (Counted cs)) t /\ tight depth t.
Proof.
  intros s cs t K T P A E.
  assert (Hk : h_kind h = NCount (length (aligned s)) /\ c = c0) by (pose proof (k_kind _ _ _ _ _ _ K) as X; unfold kind_ok in X; rewrite P in X; exact X).
  destruct Hk as [Hk C]. unfold count in E. destruct (length cs =? length (aligned s)) eqn:Lc; [|discriminate]. apply Nat.eqb_eq in Lc. simpl in E.
  injection E as <-. set (n := cut c (gsum s) cs).
  assert (Ln : n <= length cs) by apply cut_le.
  assert (Pl : plan s = []) by (apply (k_plan _ _ _ _ _ _ K), P).
  assert (Lf : length (firstn n (aligned s)) = n) by (rewrite firstn_length; lia).
  unfold h_step. rewrite Hk. rewrite <- (k_gsum _ _ _ _ _ _ K). replace (cut c0 (gsum s) cs) with n by (unfold n; rewrite C; reflexivity).
  match goal with |- _ (post _ _ ?u) /\ _ => set (u0 := u) end.
  assert (X : core (mkHist NOffer (S (h_round h)) (h_steps h ++ make_shared (length (h_steps h)) (h_round h) (firstn n cs)) (h_released h)) u0).
  { pose proof K as K'. destruct K. unfold u0. constructor; simpl; auto; try discriminate.
    - unfold kind_ok. reflexivity.
    - unfold steps_of in *. simpl. rewrite Pl, app_nil_r in k_steps.
      rewrite !app_assoc, map_app, <- app_assoc, k_steps. f_equal. rewrite make_steps_shared by lia. rewrite Lf, k_planned, k_round. reflexivity.
    - rewrite app_length, make_shared_length, firstn_length, k_planned. lia.
    - unfold h_samples. simpl. rewrite sum_over_app, make_shared_samples, k_gsum. reflexivity.
    - unfold steps_of in *. simpl. rewrite Pl, app_nil_r in k_cons. rewrite <- k_cons. unfold samples_of.
      rewrite !app_assoc, map_app, concat_app, make_steps_groups by lia. rewrite <- !app_assoc. apply Permutation_app_head.
      replace (concat (aligned s)) with (concat (firstn n (aligned s)) ++ concat (skipn n (aligned s))) by (rewrite <- concat_app, firstn_skipn; reflexivity).
      rewrite <- app_assoc. apply Permutation_app_head.
      destruct (concat (skipn n (aligned s))) as [|y ys] eqn:Ey; simpl is_nil; cbv iota; [reflexivity|].
      unfold by_position. rewrite sort_by_perm. apply Permutation_app_comm.
    - assert (Mo : has_more c s) by (destruct k_window as [X|[_ X]]; auto). left. destruct Mo as [Wa|[Wa|Wa]]; [left; exact Wa| |right; right; unfold coming, in_count in *; rewrite P in Wa; simpl; rewrite Nat.add_0_r, <- Nat.add_1_r; exact Wa].
      right. left. simpl. destruct (is_nil _); [assumption|]. unfold by_position. rewrite sort_by_length, app_length. lia.
    - intros St. specialize (k_free St). rewrite Hk in k_free. exact k_free. }
  split; [apply post_core, X|]. apply post_tight; [discriminate|discriminate|exact (tight_loose s T)].
Qed.

Lemma report_keeps : forall s rs o, core h s -> tight depth s -> at_phase s = REPORT -> failure_of rs = Some o ->
  core (h_step c0 h (Reported rs)) (drain depth o (planned s - length (plan s)) s) /\ tight depth (drain depth o (planned s - length (plan s)) s).
Proof.
  intros s rs o K T P F.
  assert (Hk : h_kind h = NReport) by (pose proof (k_kind _ _ _ _ _ _ K) as X; unfold kind_ok in X; rewrite P in X; exact X).
  unfold h_step. rewrite Hk, F.
  assert (El : planned s - length (plan s) = h_released h).
  { rewrite (k_planned _ _ _ _ _ _ K), <- (k_steps _ _ _ _ _ _ K), map_length, <- (k_released _ _ _ _ _ _ K).
    unfold steps_of, released_of. rewrite !app_length. lia. }
  rewrite El. replace s with (set_groups (groups s) s) by (destruct s; reflexivity). apply drain_entry; simpl; auto.
  - apply tight_loose, T.
  - congruence.
  - rewrite Hk. intros ? ? ?; discriminate.
  - symmetry. apply (k_released _ _ _ _ _ _ K).
  - apply (k_aligned _ _ _ _ _ _ K). rewrite P. discriminate.
Qed.

Lemma every_transition_keeps_the_invariant_of_a_rank : forall s e t, core h s -> tight depth s -> admissible c c0 inp s e ->
  transition c rank depth s e = Some t -> core (next_hist c0 h e) t /\ tight depth t.
Proof.
  intros s e t K T A E. destruct (answer_or_own e) as [[x ->]|NG].
  { simpl in E. destruct x as [a|cs|rs]; destruct (at_phase s) eqn:P; try discriminate; simpl next_hist.
    - destruct A as [A1 A2]. apply (agree_keeps s a t); assumption.
    - apply (count_keeps s cs t); assumption.
    - destruct (failure_of rs) as [o|] eqn:F; [|discriminate]. injection E as <-. apply report_keeps; assumption. }
  replace (next_hist c0 h e) with h by (destruct e; try reflexivity; edestruct NG; reflexivity).
  destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> _]]; [|auto].
  destruct e as [xs en full| |x| | |cause|]; [| |edestruct NG; reflexivity| | |..];
    try (eapply after_post_any; [exact T|apply moved_core; [exact K|exact G|exact A|discriminate|discriminate]|reflexivity..]).
  - destruct G as [x [q [Q _]]]. unfold moved. rewrite Q. simpl firstn. simpl tl.
    pose proof (taken_core s x q K Q) as K1. set (s1 := set_taken (taken s ++ [x]) (set_queue q s)) in *.
    assert (Q1 : length (queue s1) <= depth) by (pose proof (t_queue _ _ T) as X; rewrite Q in X; simpl in *; lia).
    apply settled; [apply deliver_core, K1|exact (deliver_loose _ _ _ _ _ depth _ K1 NUM Q1)|].
    intros P. destruct (deliver_eq depth s1) as [d [e [Eo [Eq _]]]]. rewrite Eq. simpl. destruct (t_done _ _ T P) as [D|[l [D1 D2]]].
    + left. simpl in Eo. rewrite D in Eo. symmetry in Eo. apply app_eq_nil in Eo. apply Eo.
    + right. exists l. split; [exact D1|]. rewrite Q in D2. rewrite !app_length. simpl in *. lia.
  - apply settled; [apply stopped_core, K|split; [exact (t_queue _ _ T)|]|]; intros _; right; eexists; (split; [reflexivity|]); simpl; destruct (limit s); lia.
Qed.

End Events.
