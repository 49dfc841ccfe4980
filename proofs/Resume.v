(** RESUME (R10): what a rank saves, which rank it becomes when that is loaded, and what a job plans whose ranks are loaded.

    [save] and [load] are those of odb_ref/core/resume.py. A rank saves where its round began, in the sense of REPLAY: a function of the
    samples and the results, not of the moment at which it saves. The rank that is loaded meets everything that Replay.v rests on. The
    ranks of a loaded job exchange anew, and plan the same steps as those of a job that continues. They go on, and end, as ranks do that
    begin an epoch: what Keeps.v to Gone.v prove of sound states holds of them. If the number of ranks changes, a checkpoint calls
    exactly those items taken that were taken, and Rest.v shares out the others. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Age Loss Gone Prompt Replay Rest.
Import ListNotations.

(** ** Saving and loading *)

Record round_start := mkStart {
  b_round : nat; b_read : nat; b_ended : bool; b_carried : list sample; b_marks : list nat; b_planned : nat; b_gsum : nat;
  b_budget : option nat }.

(** compute_round_start. [b_carried] holds samples; the Python keeps only their positions and reads the samples again (A9). *)
Definition save (u : state) : round_start :=
  let rd := last (marks u) 0 in
  mkStart (round u) rd (ended u && (read u =? rd)) (filter (fun x => pos x <? rd) (window u)) (marks u) (planned u) (gsum u) (budget u).

(** resume, before anything is posted. [before] is a ghost: the steps of earlier rounds, which this rank has taken. *)
Definition place (c : config) (rank : nat) (before : list Machine.step) (b : round_start) : state :=
  mkState FILL (b_round b) (b_read b) (b_ended b) (if b_ended b then 0 else c_window c rank (b_round b) - length (b_carried b)) (b_carried b) (b_marks b)
    [] (b_budget b) [] [] true (b_planned b) (b_gsum b) [] [] before None false false None None None.

Definition load (c : config) (rank : nat) (before : list Machine.step) (b : round_start) : state := post c rank (place c rank before b).

(** ** One rank *)

Lemma last_of_last_n : forall (l : list nat) n x d, 1 <= n -> last (last_n n (l ++ [x])) d = x.
Proof.
  intros l n x d H. unfold last_n. rewrite app_length, skipn_app. simpl. replace (length l + 1 - n - length l) with 0 by lia. simpl. apply last_last.
Qed.

Section Rank.
Variables (c : config) (src : reader) (inp : list sample).
Hypothesis OK : config_ok c.
Hypothesis placed : forall i x, nth_error inp i = Some x -> pos x = i.
(** The rank has a source of its own. *)
Hypothesis own : c_shares c = false.
Notation history := (history c).
Variable rank : nat.
Notation view_of := (view_of c rank src inp).

(** [b] is where the round began, according to the history and the view at that time. *)
Definition says_where (b : round_start) (h : hist) (v : view) : Prop :=
  b_round b = h_round h /\ b_read b = v_read v /\ b_carried b = v_window v /\ b_marks b = v_marks v /\
  b_planned b = length (h_steps h) /\ b_gsum b = h_samples h /\ b_budget b = v_budget v.

(** What a view implies about reads and marks. *)
Definition wants (h : hist) (v : view) : Prop :=
  last (v_marks v) 0 = v_read v /\
  match h_kind h with
  | NOffer => v_want v = if v_ended v then 0 else c_window c rank (h_round h) - length (v_window v)
  | NCount _ => v_want v = if v_ended v then 0 else c_window c rank (S (h_round h)) - length (v_window v)
  | _ => True
  end.

Lemma views_want : forall rs, wants (history rs) (view_of rs).
Proof.
  induction rs as [|x rs [M Wa]] using rev_ind; [split; [reflexivity|simpl; lia]|]. rewrite history_snoc, view_snoc. unfold wants, h_step, next_view.
  destruct (h_kind (history rs)) as [|t| |o l] eqn:K; destruct x as [a|cs|r]; simpl; rewrite ?K; auto.
  - destruct (is_bad a); [simpl; auto|]. destruct (o_stop_rank a) as [q|]; [simpl; auto|]. destruct (target c a) as [|n]; [simpl; auto|]. simpl h_kind. simpl v_marks. cbn [v_read v_want v_ended v_window h_round].
    rewrite own, orb_false_r. split; [apply last_of_last_n, (ok_age _ OK)|reflexivity].
  - destruct (failure_of r); simpl; rewrite ?K; auto.
Qed.

Section Saved.
Variables (h : hist) (v : view) (depth : nat) (u : state).
Hypothesis K : stands c depth rank inp h u.
Hypothesis Im : image c src inp h v u.
Hypothesis Wa : wants h v.
Hypothesis Kind : h_kind h = NOffer.
Hypothesis Quota : is_quota_met c (h_samples h) = false.
Hypothesis Ph : at_phase u = FILL \/ at_phase u = OFFER.

Lemma saved_alive : alive h.
Proof. unfold alive. rewrite Kind. exact I. Qed.

Lemma saved_cons : Permutation (samples_of (v_steps v) ++ v_window v) (firstn (v_read v) inp) /\ v_read v <= length inp.
Proof.
  destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx _]]]]. unfold unread in Fx. destruct K as [h' [_ [K' _]]]. pose proof (k_cons _ _ _ _ _ _ K') as C. pose proof (k_read _ _ _ _ _ _ K') as Le.
  rewrite (k_aligned _ _ _ _ _ _ K') in C by (destruct Ph; congruence). rewrite Wx, Rx, firstn_add, <- Fx, (i_steps _ _ _ _ _ _ Im) in C. simpl in C. rewrite app_assoc in C.
  split; [apply Permutation_app_inv_r in C; exact C|lia].
Qed.

Lemma saved_fields : says_where (save u) h v.
Proof.
  destruct Wa as [M _]. pose proof saved_cons as [C _]. destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx _]]]]. unfold unread in Fx.
  destruct (stands_on _ _ _ _ _ _ K) as [Kr [_ [Kp [Kg _]]]].
  unfold save. simpl. rewrite (i_marks _ _ _ _ _ _ Im saved_alive), M. split; [exact Kr|]. split; [reflexivity|].
  split; [|split; [reflexivity|split; [exact Kp|split; [exact Kg|exact (i_budget _ _ _ _ _ _ Im saved_alive)]]]].
  rewrite Wx, filter_app, (filter_all _ _ true), (filter_all _ _ false), app_nil_r; [reflexivity| |].
  - intros y Hy. apply Nat.ltb_ge. rewrite Fx in Hy. assert (Hs : In y (skipn (v_read v) inp)) by (rewrite <- (firstn_skipn (length x)); apply in_or_app; left; exact Hy).
    apply In_nth_error in Hs as [i E]. rewrite nth_error_of_skipn in E. rewrite (placed _ y E). apply Nat.le_add_r.
  - intros y Hy. apply Nat.ltb_lt. assert (Hf : In y (firstn (v_read v) inp)) by (apply (Permutation_in _ C), in_or_app; right; exact Hy).
    apply In_nth_error in Hf as [i E]. apply nth_error_of_firstn in E as [L E]. rewrite (placed i y E). exact L.
Qed.

Lemma saved_reading : forall before, reading src inp v (place c rank before (save u)) /\ (b_ended (save u) = true -> v_read v = length inp).
Proof.
  intros before. destruct saved_fields as [F1 [F2 [F3 _]]]. destruct Wa as [M Wn]. rewrite Kind in Wn. destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx [Lx C]]]]].
  assert (Be : b_ended (save u) = ended u && (read u =? v_read v)) by (unfold save; simpl; rewrite (i_marks _ _ _ _ _ _ Im saved_alive), M; reflexivity).
  split.
  - exists []. unfold place. cbn [window read ended wanted length]. rewrite F2, F3, app_nil_r, F1. split; [reflexivity|]. split; [lia|]. split; [reflexivity|]. split; [lia|].
    rewrite Be. destruct (v_ended v) eqn:E.
    + destruct C as [-> [En _]]. simpl in Rx. rewrite En, Rx, Nat.add_0_r, Nat.eqb_refl. auto.
    + destruct (ended u) eqn:En; [|simpl; split; [lia|auto]]. destruct C as [_ [Re Le]]. destruct (read u =? v_read v) eqn:Q; simpl; [|split; [lia|auto]]. apply Nat.eqb_eq in Q.
      assert (X : x = []) by (destruct x; [reflexivity|simpl in Rx; lia]). subst x. split; [reflexivity|]. split; [lia|]. destruct (is_eager src); simpl in Le; lia.
  - rewrite Be. intros Z. apply andb_true_iff in Z as [Z1 Z2]. apply Nat.eqb_eq in Z2. rewrite <- Z2. destruct K as [h' [_ [K' _]]]. destruct (k_ended _ _ _ _ _ _ K' Z1) as [X Y]. specialize (Y own). lia.
Qed.

(** Loaded at any depth, the rank meets the invariant for the same history. *)
Lemma loaded_stands : forall d, stands c d rank inp h (load c rank (steps_of u) (save u)).
Proof.
  intros d. destruct K as [h1 [A [K1 _]]]. destruct (stands_on _ _ _ _ _ _ K) as [Kr [_ [Kp [Kg _]]]].
  destruct saved_fields as [F1 [F2 [F3 [_ [F5 [F6 _]]]]]]. destruct (saved_reading (steps_of u)) as [_ Re]. destruct saved_cons as [C Le].
  exists (mkHist NOffer (h_round h) (h_steps h) (length (h_steps h))). split; [constructor; [rewrite Kind|simpl|simpl]; reflexivity|].
  set (w := place c rank (steps_of u) (save u)). assert (St : map shared (steps_of u) = h_steps h) by (rewrite (al_steps _ _ A); apply (k_steps _ _ _ _ _ _ K1)).
  assert (Ln : length (steps_of u) = length (h_steps h)) by (rewrite <- St, map_length; reflexivity).
  unfold load. fold w. split; [apply post_core|apply post_tight; try discriminate; split; simpl; [lia|intros X; contradiction X; reflexivity]].
  constructor; try (simpl; discriminate); try exact F1; try exact F5; try exact F6; try (simpl; reflexivity).
  - unfold steps_of at 1. simpl. rewrite app_nil_r. exact St.
  - unfold released_of. simpl. rewrite app_nil_r. exact Ln.
  - unfold steps_of at 1. unfold w, place. cbn [taken queue released plan aligned window read concat app]. rewrite app_nil_r, F2, F3, (i_steps _ _ _ _ _ _ Im). exact C.
  - unfold w, place. cbn [read]. rewrite F2. exact Le.
  - unfold w, place. cbn [ended read wanted]. intros E. rewrite F2, E. split; [rewrite (Re E); lia|reflexivity].
  - unfold w, place. cbn [ended window wanted]. left. unfold has_more. cbn [ended window wanted]. destruct (b_ended (save u)); [left; reflexivity|right].
    unfold coming, in_count. cbn [round at_phase]. rewrite Nat.add_0_r. destruct (has_steps c (b_round (save u))) eqn:Hs; [left|auto]. pose proof (ok_window _ OK rank _ Hs). lia.
Qed.

End Saved.
End Rank.

(** ** The job *)

Section Resume.
Variables (W : nat) (c : config) (src : nat -> reader) (input : nat -> list sample).
Hypothesis ok : setting_ok W (fun _ => c).
Hypothesis placed : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation history := (history c).
Notation replays := (Replay.replays W c src input).
Notation view_at := (fun s r => view_of c r (src r) (input r) (seen s r)).

(** A rank with its own source that has begun a round which is not agreed on yet, before the quota is met, has something to save. *)
Definition has_begun (u : state) : Prop := (at_phase u = FILL \/ at_phase u = OFFER) /\ is_quota_met c (gsum u) = false /\ c_shares c = false.

Lemma begun_says : forall d s r, tells W c src input d s -> r < W -> has_begun (rank_of s r) -> let h := history (seen s r) in
  stands c (d r) r (input r) h (rank_of s r) /\ image c (src r) (input r) h (view_at s r) (rank_of s r) /\ h_kind h = NOffer /\ is_quota_met c (h_samples h) = false.
Proof.
  intros d s r T H [Ph [Qu _]] h. pose proof (bs_rank _ _ _ _ _ (tell_basis _ _ _ _ _ _ T) r H) as K. fold h in K. destruct (stands_on _ _ _ _ _ _ K) as [_ [Kk [_ [Kg _]]]].
  split; [exact K|]. split; [exact (tell_images _ _ _ _ _ _ T r H)|]. split; [|rewrite <- Kg; exact Qu].
  unfold kind_ok in Kk. destruct Ph as [P|P]; rewrite P in Kk; exact Kk.
Qed.

Lemma begun_saves : forall d s r, tells W c src input d s -> r < W -> has_begun (rank_of s r) -> says_where (save (rank_of s r)) (history (seen s r)) (view_at s r).
Proof.
  intros d s r T H Sv. destruct (begun_says d s r T H Sv) as [K [Im [Kd Qu]]]. pose proof (configs_ok _ _ ok r H) as C.
  apply (saved_fields c (src r) (input r) (fun i x => placed r i x H) r _ _ _ _ K Im (views_want c (src r) (input r) C (proj2 (proj2 Sv)) r _) Kd Qu (proj1 Sv)).
Qed.

Lemma begun_loads : forall d s r, tells W c src input d s -> r < W -> has_begun (rank_of s r) ->
  let u := load c r (steps_of (rank_of s r)) (save (rank_of s r)) in let h := history (seen s r) in
  (forall d', stands c d' r (input r) h u) /\ image c (src r) (input r) h (view_at s r) u.
Proof.
  intros d s r T H Sv u0 h. destruct (begun_says d s r T H Sv) as [K [Im [Kd Qu]]]. pose proof (configs_ok _ _ ok r H) as C. pose proof (views_want c (src r) (input r) C (proj2 (proj2 Sv)) r (seen s r)) as Wa.
  split; [exact (loaded_stands c (src r) (input r) C (fun i x => placed r i x H) (proj2 (proj2 Sv)) r _ _ _ _ K Im Wa Kd Qu (proj1 Sv))|].
  destruct (begun_saves d s r T H Sv) as [_ [_ [_ [F4 [_ [_ F7]]]]]]. unfold u0, load. set (u := place c r (steps_of (rank_of s r)) (save (rank_of s r))).
  destruct (part_post c r u) as [P1 P2]. apply (image_part c (src r) (input r) _ _ u); [exact P1|exact P2|apply post_fair|]. constructor.
  - unfold u, steps_of. simpl. rewrite app_nil_r. apply (i_steps _ _ _ _ _ _ Im).
  - intros t Ht. fold h in Kd. rewrite Kd in Ht. discriminate.
  - intros _. exact F4.
  - intros _ _. apply (saved_reading c (src r) (input r) (fun i x => placed r i x H) (proj2 (proj2 Sv)) r _ _ _ _ K Im Wa Kd Qu (proj1 Sv)).
  - intros l Hk. fold h in Kd. rewrite Kd in Hk. discriminate.
  - intros X. discriminate.
  - intros _. exact F7.
Qed.

(** A rank that saves, in a job that has not been loaded. *)
Record saves (d : nat -> nat) (s : sys) (r : nat) : Prop := { sv_run : replays d s; sv_rank : r < W; sv_begun : has_begun (rank_of s r) }.

Theorem what_a_rank_saves_is_where_its_round_began : forall d s r, saves d s r ->
  says_where (save (rank_of s r)) (history (seen s r)) (view_at s r).
Proof. intros d s r [Rp H B]. apply (begun_saves d s r); auto. apply replays_tell; assumption. Qed.

(** RESUME: the loaded rank has the steps, window, marks and reads that follow from the samples and the results ([image], on which all of
    REPLAY rests). *)
Theorem a_rank_that_is_loaded_is_what_its_view_says : forall d s r, saves d s r ->
  image c (src r) (input r) (history (seen s r)) (view_at s r) (load c r (steps_of (rank_of s r)) (save (rank_of s r))).
Proof. intros d s r [Rp H B]. apply (begun_loads d s r); auto. apply replays_tell; assumption. Qed.

(** ** A job that is loaded again *)

(** [u r] is the state in which rank [r] saved. The exchange begins anew; a rank that waits for nothing posts its offer at once. *)
Definition loaded (u : nat -> state) : sys :=
  let v r := load c r (steps_of (u r)) (save (u r)) in mkSys v (fun _ => 0) (fun r => is_waiting (v r)) [] (fun _ => false).

(** A job at the depth [d]. It begins, it continues, and it may be loaded again, at another depth and any number of times, if all ranks
    have saved in the same round. Each rank may have saved at its own moment, and even in a different job. *)
Inductive job : (nat -> nat) -> sys -> Prop :=
| job_begins : forall d, job d (start (fun _ => c))
| job_goes_on : forall d s l t, job d s -> System.step W (fun _ => c) d input s l t -> ends_alike src input s l -> job d t
| job_is_loaded : forall d k (depths : nat -> nat -> nat) (moments : nat -> sys),
    (forall r, r < W -> job (depths r) (moments r)) ->
    (forall r, r < W -> has_begun (rank_of (moments r) r) /\ round (rank_of (moments r) r) = k) ->
    job d (loaded (fun r => rank_of (moments r) r)).

(** The log of a loaded job is empty. Nothing depends on the log before the results that a rank waits for, so the log may as well begin
    with what was exchanged before. *)
Record remembers (past : list (list msg * result)) (s t : sys) : Prop := {
  re_rank : forall r, r < W -> rank_of t r = rank_of s r;
  re_got : forall r, r < W -> got t r = length past + got s r;
  re_pending : forall r, r < W -> pending t r = pending s r;
  re_running : forall r, r < W -> running t r = running s r;
  re_log : log t = past ++ log s }.

Lemma remembered_step : forall past d s t l s', remembers past s t -> System.step W (fun _ => c) d input s l s' -> ends_alike src input s l ->
  exists t', System.step W (fun _ => c) d input t l t' /\ ends_alike src input t l /\ remembers past s' t'.
Proof.
  intros past d s t l s' [Rr Rg Rp Ru Rl] St Al. assert (Res : results t = map snd past ++ results s) by (unfold results; rewrite Rl; apply map_app).
  destruct St as [s i e v H M E|s x P Rd|s i H Run Tk|s i n la H D]; [| | |destruct Al].
  - assert (M' : may (fun _ => c) input t i e).
    { destruct e; simpl in *; rewrite ?(Rr i H), ?(Rp i H), ?(Ru i H); try exact M. rewrite (Rg i H), Res, nth_error_app2 by (rewrite map_length; lia).
      rewrite map_length. replace (length past + got s i - length past) with (got s i) by lia. exact M. }
    assert (E' : transition c i (d i) (rank_of t i) e = Some v) by (rewrite (Rr i H); exact E).
    eexists. split; [exact (StepRank W (fun _ => c) d input t i e v H M' E')|]. split; [destruct e; simpl in *; rewrite ?(Rr i H); exact Al|]. constructor; simpl.
    + intros r Hr. unfold update. destruct (r =? i); [reflexivity|apply (Rr r Hr)].
    + intros r Hr. destruct e; try apply (Rg r Hr). unfold update. destruct (r =? i); [rewrite (Rg i H); lia|apply (Rg r Hr)].
    + intros r Hr. rewrite (Rr i H). destruct (has_posted (rank_of s i) v); [|apply (Rp r Hr)]. unfold update. destruct (r =? i); [reflexivity|apply (Rp r Hr)].
    + intros r Hr. destruct e; try apply (Ru r Hr). unfold update. destruct (r =? i); [reflexivity|apply (Ru r Hr)].
    + exact Rl.
  - assert (Ms : messages W t = messages W s) by (unfold messages; apply map_ext_in; intros r Hr; apply in_seq in Hr; rewrite (Rr r) by lia; reflexivity).
    assert (P' : forall r, r < W -> pending t r = true) by (intros r Hr; rewrite (Rp r Hr); apply P, Hr).
    assert (Rd' : reduce (messages W t) = Some x) by (rewrite Ms; exact Rd).
    eexists. split; [exact (StepExchange W (fun _ => c) d input t x P' Rd')|]. split; [exact Logic.I|]. constructor; simpl; auto. rewrite Ms, Rl. symmetry. apply app_assoc.
  - assert (Run' : running t i = true) by (rewrite (Ru i H); exact Run).
    assert (Tk' : forall q, q < W -> length (taken (rank_of t i)) <= length (taken (rank_of t q))) by (intros q Hq; rewrite (Rr i H), (Rr q Hq); apply Tk, Hq).
    eexists. split; [exact (StepTrained W (fun _ => c) d input t i H Run' Tk')|]. split; [exact Logic.I|]. constructor; simpl; auto.
    intros r Hr. unfold update. destruct (r =? i); [reflexivity|apply (Ru r Hr)].
Qed.

(** The round determines the number of exchanges. *)
Lemma rounds_count : forall d s n, tells W c src input d s -> n <= length (log s) -> alive (history (firstn n (results s))) ->
  n = 2 * h_round (history (firstn n (results s))) + match h_kind (history (firstn n (results s))) with NCount _ => 1 | _ => 0 end.
Proof.
  intros d s n T. induction n as [|n IH]; intros L A; [reflexivity|]. pose proof (alive_before c _ n (S n) (Nat.le_succ_diag_r n) A) as B. specialize (IH ltac:(lia) B).
  destruct (nth_error (log s) n) as [[ms x]|] eqn:E; [|apply nth_error_None in E; lia]. pose proof (results_nth _ _ _ E) as Ex. simpl in Ex.
  pose proof (tell_log _ _ _ _ _ _ T n ms x E (or_introl A)) as M. destruct (log_entry _ _ _ _ s n _ (tell_basis _ _ _ _ _ _ T) E) as [Lm [Rd _]]. simpl in Lm, Rd.
  destruct (nth_error ms 0) as [m|] eqn:Hm; [|apply nth_error_None in Hm; pose proof (some_rank _ _ ok); lia]. specialize (M 0 m Hm). unfold message_of in M.
  rewrite (firstn_snoc _ _ _ _ Ex), history_snoc in *. set (h := history (firstn n (results s))) in *. unfold alive, h_step in *. apply nth_error_In in Hm.
  destruct (h_kind h) as [|k| |o lm] eqn:K; try contradiction.
  - destruct M as [_ [o [-> _]]]. destruct x as [a|cs|rs]; [|destruct (reduce_says _ _ _ Rd Hm)..].
    destruct (is_bad a); [contradiction|]. destruct (o_stop_rank a); [contradiction|]. destruct (target c a); simpl in *; [contradiction|lia].
  - subst m. destruct x as [a|cs|rs]; [destruct (reduce_says _ _ _ Rd Hm)|simpl; lia|destruct (reduce_says _ _ _ Rd Hm)].
Qed.

Lemma begun_seen : forall d s r k, tells W c src input d s -> r < W -> has_begun (rank_of s r) -> round (rank_of s r) = k ->
  got s r = 2 * k /\ length (seen s r) = 2 * k /\ alive (history (seen s r)).
Proof.
  intros d s r k T H B Rd. destruct (begun_says d s r T H B) as [K [_ [Kd _]]]. destruct (stands_on _ _ _ _ _ _ K) as [Kr _]. pose proof (got_some _ _ _ _ _ _ _ T H) as G.
  assert (A : alive (history (seen s r))) by (unfold alive; rewrite Kd; exact Logic.I). pose proof (rounds_count d s (got s r) T G A) as N2. fold (seen s r) in N2. rewrite Kd, <- Kr, Rd, Nat.add_0_r in N2.
  split; [exact N2|]. split; [|exact A]. unfold seen. rewrite firstn_length. unfold results. rewrite map_length. lia.
Qed.

Lemma job_tells : forall d s, job d s -> exists past t, remembers past s t /\ tells W c src input d t.
Proof.
  intros d s J. induction J as [d|d s l t J [past [s2 [Re T]]] St Al|d k depths moments J IH B].
  - exists [], (start (fun _ => c)). split; [constructor; reflexivity|apply start_tells; assumption].
  - destruct (remembered_step past d s s2 l t Re St Al) as [t2 [St2 [Al2 Re2]]]. exists past, t2. split; [exact Re2|]. eapply step_keeps_tells; eauto.
  - assert (Each : forall r, r < W -> exists t, rank_of t r = rank_of (moments r) r /\ tells W c src input (depths r) t /\ got t r = 2 * k /\ length (seen t r) = 2 * k /\ alive (history (seen t r))).
    { intros r H. destruct (IH r H) as [past [t [Re T]]]. destruct (B r H) as [B1 B2]. rewrite <- (re_rank _ _ _ Re r H) in B1, B2. exists t. split; [apply (re_rank _ _ _ Re r H)|]. split; [exact T|].
      apply (begun_seen (depths r) t r k T H B1 B2). }
    pose proof (some_rank _ _ ok) as SR. destruct (Each 0 SR) as [t0 [_ [T0 [G0 [L0 A0]]]]]. set (past := firstn (2 * k) (log t0)).
    pose proof (got_some _ _ _ _ _ _ _ T0 SR) as Le. assert (Lp : length past = 2 * k) by (unfold past; rewrite firstn_length; lia).
    assert (Rs : map snd past = seen t0 0) by (unfold past, seen, results; rewrite G0, firstn_map; reflexivity).
    exists past. eexists (mkSys (rank_of (loaded (fun r => rank_of (moments r) r))) (fun _ => length past) (pending (loaded (fun r => rank_of (moments r) r))) past (fun _ => false)).
    split; [constructor; simpl; intros; rewrite ?Nat.add_0_r, ?app_nil_r; reflexivity|]. set (t := mkSys _ _ _ _ _).
    assert (Se : forall r, seen t r = seen t0 0).
    { intros r. unfold seen at 1. unfold t, results. cbn [got log]. rewrite Rs. apply firstn_all2. lia. }
    assert (Same : forall r, r < W -> exists s, rank_of s r = rank_of (moments r) r /\ tells W c src input (depths r) s /\ seen s r = seen t r).
    { intros r H. destruct (Each r H) as [s [E [T [G [L A]]]]]. exists s. split; [exact E|]. split; [exact T|]. rewrite Se. unfold seen in *. rewrite G in *. rewrite G0 in *.
      apply (same_results W c src input _ _ s t0 T T0); [pose proof (got_some _ _ _ _ _ _ _ T H); lia|lia|exact A|exact A0]. }
    assert (Ranks : forall r, r < W -> stands c (d r) r (input r) (history (seen t r)) (rank_of t r) /\ image c (src r) (input r) (history (seen t r)) (view_at t r) (rank_of t r)).
    { intros r H. destruct (Same r H) as [s [E [T <-]]]. unfold t, loaded. cbn [rank_of]. rewrite <- E. assert (Sv : has_begun (rank_of s r)) by (rewrite E; apply (B r H)).
      destruct (begun_loads (depths r) s r T H Sv) as [Ls Li]. exact (conj (Ls (d r)) Li). }
    constructor.
    + constructor; [constructor|apply Ranks].
      * intros r H. destruct (Ranks r H) as [[h [_ KT]] _]. exists h. exact KT.
      * intros r H. unfold sync. change (pending t r) with (is_waiting (rank_of t r)). destruct (is_waiting (rank_of t r)); [left|right; right]; repeat split.
      * apply Forall_firstn, (g_log _ _ _ _ _ (tell_basis _ _ _ _ _ _ T0)).
    + intros r H. apply (Ranks r H).
    + intros i ms x Hi. unfold t in Hi. cbn [log] in Hi. assert (Li : i < 2 * k) by (rewrite <- Lp; apply nth_error_Some; congruence).
      assert (F : forall j, j <= 2 * k -> firstn j (results t) = firstn j (results t0)).
      { intros j Lj. unfold t, results. cbn [log]. unfold past. rewrite <- firstn_map, firstn_firstn, Nat.min_l by exact Lj. reflexivity. }
      rewrite !F by lia. apply (tell_log _ _ _ _ _ _ T0 i ms x). rewrite <- (firstn_skipn (2 * k) (log t0)), nth_error_app1 by (fold past; lia). exact Hi.
    + intros l Hk. exfalso. unfold whole in Hk. change (results t) with (map snd past) in Hk. rewrite Rs in Hk. unfold alive in A0. rewrite Hk in A0. exact A0.
Qed.

(** RESUME, for a whole job with the same number of ranks: whatever is loaded, when and how often, at whatever depths and under whatever
    schedules, and whatever fails or stops, the steps planned on a rank in one job begin those planned in the other. Either job may never
    have been loaded. *)
Theorem a_job_that_is_loaded_plans_the_steps_of_any_other : plan_alike W job.
Proof.
  intros d d' s s' r J J' H. destruct (job_tells d s J) as [past [t [Re T]]]. destruct (job_tells d' s' J') as [past' [t' [Re' T']]].
  rewrite <- (re_rank _ _ _ Re r H), <- (re_rank _ _ _ Re' r H). apply (what_two_runs_tell W c src input d d'); assumption.
Qed.

Theorem complete_jobs_have_planned_the_same_steps : complete_alike W job.
Proof.
  intros d d' s s' r J J' H. destruct (job_tells d s J) as [past [t [Re T]]]. destruct (job_tells d' s' J') as [past' [t' [Re' T']]].
  rewrite <- (re_rank _ _ _ Re r H), <- (re_rank _ _ _ Re' r H). apply (what_two_complete_runs_tell W c src input ok d d'); assumption.
Qed.

(** The checkpoint of a rank that has taken the samples at the positions [t] in its current round: see [Rest.checkpoint]. *)
Definition checkpoint_of (b : round_start) (t : list nat) : checkpoint := mkCheckpoint (b_read b) (map pos (b_carried b)) t.

(** RESUME with another number of ranks: a checkpoint calls a position taken exactly if it is in a step of an earlier round or among those
    taken in the current round. So the checkpoint is sound, and Rest.v shares out the other positions. *)
Theorem a_checkpoint_tells_what_was_taken : forall d s r t, job d s -> r < W -> has_begun (rank_of s r) ->
  let k := checkpoint_of (save (rank_of s r)) t in
  sound (length (input r)) k /\
  ((forall p, In p t -> k_read_samples k <= p \/ In p (k_carried k)) ->
   forall p, is_taken k p = true <-> In p (map pos (samples_of (steps_of (rank_of s r)))) \/ In p t).
Proof.
  intros d s0 r t J H Sv k. destruct (job_tells d s0 J) as [past [s [Re T]]]. unfold k in *. clear k. rewrite <- (re_rank _ _ _ Re r H) in *. set (k := checkpoint_of _ _).
  destruct (begun_says d s r T H Sv) as [K [Im [Kd Qu]]]. destruct (begun_saves d s r T H Sv) as [_ [F2 [F3 _]]].
  destruct (saved_cons c (src r) (input r) r _ _ _ _ K Im Kd Qu (proj1 Sv)) as [Cs Le]. rewrite <- (i_steps _ _ _ _ _ _ Im) in Cs.
  unfold k, checkpoint_of, sound, is_taken. cbn [k_read_samples k_carried k_taken]. rewrite F2, F3.
  set (v := view_at s r) in *. set (rd := v_read v) in *. set (S := map pos (samples_of (steps_of (rank_of s r)))). set (w := map pos (v_window v)).
  assert (Ps : Permutation (S ++ w) (seq 0 rd)).
  { unfold S, w. rewrite <- map_app, (Permutation_map pos Cs). assert (X : map pos (firstn rd (input r)) = seq 0 rd); [|rewrite X; reflexivity].
    rewrite (map_numbered _ _ pos (fun i => i)), map_id, firstn_length, Nat.min_l by (exact Le || (intros i x E; apply nth_error_of_firstn in E as [_ E]; exact (placed r i x H E))). reflexivity. }
  assert (Nd : NoDup (S ++ w)) by (apply (Permutation_NoDup (Permutation_sym Ps)), seq_NoDup).
  assert (In_all : forall p, In p (S ++ w) <-> p < rd).
  { intros p. split; intros I; [apply (Permutation_in _ Ps), in_seq in I; lia|apply (Permutation_in _ (Permutation_sym Ps)), in_seq; lia]. }
  assert (Apart : forall p, In p S -> ~ In p w).
  { intros p Ip Iw. clear - Nd Ip Iw. induction S as [|x l IH]; [destruct Ip|]. inversion Nd; subst. destruct Ip as [->|Ip]; [apply H1, in_or_app; right; exact Iw|apply (IH H2 Ip)]. }
  split.
  - split; [exact Le|]. split; [clear - Nd; induction S as [|x l IH]; [exact Nd|inversion Nd; auto]|]. apply Forall_forall. intros p Ip. apply In_all, in_or_app. right. exact Ip.
  - intros Ht p. destruct (rd <=? p) eqn:E; simpl.
    + apply Nat.leb_le in E. rewrite among_in. split; [auto|]. intros [I|I]; [|exact I]. assert (X : p < rd) by (apply In_all, in_or_app; left; exact I). lia.
    + apply Nat.leb_gt in E. destruct (among p w) eqn:A.
      * apply among_in in A. rewrite among_in. split; [auto|]. intros [I|I]; [destruct (Apart p I A)|exact I].
      * assert (Nw : ~ In p w) by (intros I; apply among_in in I; congruence). split; [|reflexivity]. intros _. left. apply In_all, in_app_or in E as [I|I]; [exact I|contradiction].
Qed.

(** ** A loaded job is sound

    Its log is empty, so its history begins with the steps planned before ([origin]). That they are as [sound] says follows from the jobs
    in which its ranks saved: from the one of rank 0, once its other ranks have received what there is, and from REPLAY for the others. *)

Notation cfg := (fun _ : nat => c).
Notation sound h0 d := (Keeps.sound W cfg d input (h0 := h0)).

(** A rank that has begun a round has planned all steps of which there are results. *)
Lemma begun_whole : forall {h0} d s r, System.invariant W cfg d input (h0 := h0) s -> r < W -> at_phase (rank_of s r) = FILL \/ at_phase (rank_of s r) = OFFER ->
  h_steps (whole_from cfg h0 s) = map shared (steps_of (rank_of s r)) /\ h_round (whole_from cfg h0 s) = round (rank_of s r).
Proof.
  intros h0 d s r I H Ph. pose proof (g_core _ _ _ _ _ I r H) as K. rewrite (k_steps _ _ _ _ _ _ K), (k_round _ _ _ _ _ _ K).
  assert (Kk : h_kind (hist_from cfg h0 s r) = NOffer) by (pose proof (k_kind _ _ _ _ _ _ K) as X; unfold kind_ok in X; destruct Ph as [P|P]; rewrite P in X; exact X).
  destruct (hist_cases W cfg d input s r I H) as [[_ ->]|[_ [_ [_ [ms [x [_ [_ ->]]]]]]]]; [auto|]. unfold h_step. rewrite Kk. destruct x as [a|cs|rs]; auto. destruct (is_bad a), (o_stop_rank a); auto.
Qed.

(** Any rank may receive what there are results of. It has then planned the steps whose groups it held. *)
Lemma caught_up : forall {h0} d s q, job d s -> sound h0 d s -> q < W -> c_shares c = false -> let n := length (h_steps (whole_from cfg h0 s)) in
  exists t, job d t /\ length (steps_of (rank_of t q)) = n /\ forall j, j < n -> nth j (map s_group (steps_of (rank_of t q))) [] = nth j (groups_of (rank_of s q)) [].
Proof.
  intros h0 d s q J So H Own n. pose proof (so_invariant _ _ _ _ _ So) as I.
  assert (Go : forall t, job d t -> core c c q (input q) (whole_from cfg h0 s) (rank_of t q) -> (forall j, j < n -> nth j (groups_of (rank_of t q)) [] = nth j (groups_of (rank_of s q)) []) ->
    exists t, job d t /\ length (steps_of (rank_of t q)) = n /\ forall j, j < n -> nth j (map s_group (steps_of (rank_of t q))) [] = nth j (groups_of (rank_of s q)) []).
  { intros t Jt K G. assert (Ln : length (steps_of (rank_of t q)) = n) by (unfold n; rewrite <- (k_steps _ _ _ _ _ _ K), map_length; reflexivity). exists t. split; [exact Jt|]. split; [exact Ln|].
    intros j L. rewrite <- (G j L). unfold groups_of. rewrite app_nth1; [reflexivity|rewrite map_length, Ln; exact L]. }
  destruct (hist_cases W cfg d input s q I H) as [[_ E]|[Pq [_ [_ [ms [x [El [_ E]]]]]]]]; [apply (Go s J); [rewrite <- E; exact (g_core _ _ _ _ _ I q H)|reflexivity]|].
  assert (M : may cfg input s q (Got x)) by (split; [exact Pq|split; [exact (results_nth _ _ _ El)|rewrite Own; discriminate]]).
  destruct (every_result_is_accepted W cfg d input s q x So H Pq (results_nth _ _ _ El)) as [u T]. refine (Go _ (job_goes_on d s _ _ J (StepRank W cfg d input s q _ u H M T) Logic.I) _ _); cbn [rank_of]; rewrite update_same.
  - rewrite E. exact (rank_step_after W cfg d input ok s q _ u I H M T).
  - intros j L. exact (rank_keeps_groups W cfg d input ok s q _ u j I H M T L).
Qed.

(** The state of a rank that has begun a round determines the history that it matches. *)
Lemma a_core_says : forall c0 r inp h u, core c c0 r inp h u -> at_phase u = FILL \/ at_phase u = OFFER -> h = mkHist NOffer (round u) (map shared (steps_of u)) (length (released_of u)).
Proof.
  intros c0 r inp h u K Ph. pose proof (k_kind _ _ _ _ _ _ K) as X. unfold kind_ok in X. rewrite (k_round _ _ _ _ _ _ K), (k_steps _ _ _ _ _ _ K), (k_released _ _ _ _ _ _ K).
  destruct h. simpl in *. destruct Ph as [P|P]; rewrite P in X; congruence.
Qed.

(** Every moment of a job is sound ([Keeps.sound]), however often the job was loaded. *)
Theorem every_moment_of_a_job_is_sound : forall d s, job d s -> exists h0, sound h0 d s.
Proof.
  intros d s J. induction J as [d|d s l t J [h0 So] St Al|d k depths moments J IH B].
  - exists fresh. exact (sound_of ok (reach_start W cfg d input)).
  - exists h0. exact (step_keeps_sound W cfg d input ok s l t So St).
  - pose proof (some_rank _ _ ok) as SR. set (u := fun r => rank_of (moments r) r). destruct (job_tells d (loaded u) (job_is_loaded d k depths moments J B)) as [past [t [Re T]]].
    assert (Se : forall r, r < W -> seen t r = map snd past).
    { intros r H. unfold seen, results. rewrite (re_log _ _ _ Re), (re_got _ _ _ Re r H). simpl. rewrite app_nil_r, Nat.add_0_r, <- (map_length snd). apply firstn_all. }
    set (steps := h_steps (history (map snd past))).
    assert (Lo : forall r, at_phase (rank_of (loaded u) r) = FILL \/ at_phase (rank_of (loaded u) r) = OFFER) by (intros r; destruct (post_phase c r (place c r (steps_of (u r)) (save (u r)))) as [E|[_ E]]; [left|right]; exact E).
    assert (St : forall r, steps_of (rank_of (loaded u) r) = steps_of (u r)) by (intros r; unfold steps_of at 1; simpl; apply app_nil_r).
    assert (K : forall r, r < W -> map shared (steps_of (u r)) = steps /\ core c c r (input r) (mkHist NOffer k steps (length steps)) (rank_of (loaded u) r) /\ tight (d r) (rank_of (loaded u) r)).
    { intros r H. destruct (bs_rank _ _ _ _ _ (tell_basis _ _ _ _ _ _ T) r H) as [h [A [K Ti]]]. rewrite (re_rank _ _ _ Re r H) in *. rewrite (Se r H) in A.
      assert (E : map shared (steps_of (u r)) = steps) by (rewrite <- St, (k_steps _ _ _ _ _ _ K); symmetry; exact (al_steps _ _ A)). split; [exact E|]. split; [|exact Ti].
      rewrite (a_core_says _ _ _ _ _ K (Lo r)), St, E in K. destruct (B r H) as [_ Rd]. replace (length (released_of (rank_of (loaded u) r))) with (length steps) in K.
      - replace (round (rank_of (loaded u) r)) with k in K by (symmetry; exact Rd). exact K.
      - rewrite <- E, map_length. unfold released_of. simpl. rewrite app_nil_r. reflexivity. }
    set (h0 := mkOrigin (mkHist NOffer k steps (length steps)) eq_refl (history_numbered c (map snd past)) (le_n _)). exists h0.
    destruct (IH 0 SR) as [h1 So]. destruct (B 0 SR) as [B0 Rd]. destruct (begun_whole (depths 0) (moments 0) 0 So SR (proj1 B0)) as [Ws Wr]. rewrite (proj1 (K 0 SR) : map shared (steps_of (rank_of (moments 0) 0)) = steps) in Ws. rewrite Rd in Wr.
    assert (Ks : forall r, r < W -> length (steps_of (u r)) = length steps) by (intros r H; rewrite <- (proj1 (K r H)), map_length; reflexivity).
    constructor; [constructor; [constructor|]|constructor|constructor].
    + intros r H. eexists. exact (proj2 (K r H)).
    + intros r H. unfold sync. simpl. destruct (is_waiting _); auto.
    + constructor.
    + intros r H. exact (proj1 (proj2 (K r H))).
    + discriminate.
    + discriminate.
    + discriminate.
    + change (Forall (fun x : shared_step => 1 <= n_samples (snd x)) steps). rewrite <- Ws. exact (n_work _ _ _ So).
    + intros n L. change (n < length steps) in L. rewrite <- Ws in L. pose proof (n_first _ _ _ So n L) as F. unfold planned_samples in *. rewrite Ws in F. exact F.
    + intros j x Hx. change (nth_error steps j = Some x) in Hx. assert (Lj : j < length steps) by (apply nth_error_Some; congruence). rewrite <- Ws in Hx. rewrite (n_true _ _ _ So j x Hx).
      unfold true_counts. f_equal. apply map_ext_seq. intros q H. f_equal. unfold groups_of at 2. rewrite St. simpl. rewrite app_nil_r.
      destruct (caught_up (depths 0) (moments 0) q (J 0 SR) So H (proj2 (proj2 B0))) as [v [Jv [Lv Gv]]]. rewrite Ws in Lv, Gv. rewrite <- (Gv j Lj). do 2 f_equal.
      destruct (a_job_that_is_loaded_plans_the_steps_of_any_other _ _ v (moments q) q Jv (J q H) H) as [[e E]|[e E]]; change (rank_of (moments q) q) with (u q) in E; pose proof (f_equal (@length _) E) as Le;
        rewrite app_length, Lv, (Ks q H) in Le; (destruct e; [|simpl in Le; lia]); rewrite app_nil_r in E; congruence.
    + intros r H P. destruct (Lo r); congruence.
    + discriminate.
    + constructor.
    + split; [|simpl; lia]. pose proof (proj1 (d_rounds _ _ _ So)) as R. rewrite Ws, Wr in R. exact R.
    + intros r q Hr Hq. change (length (steps_of (u r)) <= length (steps_of (u q)) + 0). rewrite !Ks by assumption. lia.
Qed.

Theorem a_complete_rank_of_a_job_has_planned_its_whole_input : forall d s r, job d s -> r < W -> c_is_quota c = false -> c_quota c = None ->
  is_ending (rank_of s r) = true -> ended_as (rank_of s r) = Some Complete -> Permutation (samples_of (steps_of (rank_of s r))) (input r).
Proof. intros d s r J. destruct (every_moment_of_a_job_is_sound d s J) as [h0 So]. exact (a_complete_rank_has_planned_its_whole_input W cfg d input s r So). Qed.

Theorem nothing_is_lost_in_a_job : forall d s r, job d s -> r < W -> let u := rank_of s r in
  Permutation (samples_of (steps_of u) ++ concat (aligned u) ++ window u ++ skipn (read u) (input r)) (input r).
Proof. intros d s r J. destruct (every_moment_of_a_job_is_sound d s J) as [h0 So]. exact (nothing_is_lost W cfg d input s r So). Qed.

End Resume.

(** Where ranks may begin: at the start of an epoch; or at any moment of a job that was loaded, any number of times, if all ranks have one
    configuration. *)
Definition begins (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample) (s : sys) : Prop :=
  s = start cfg \/ exists c src, cfg = (fun _ => c) /\ (forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i) /\ job W c src input depth s.

(** What some schedule with losses leads to from there. *)
Definition reached (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample) (s : sys) : Prop :=
  exists s0 n, begins W cfg depth input s0 /\ lossy_path W cfg depth input s0 n s.

Lemma begins_sound : forall W cfg depth input, setting_ok W cfg -> forall s, begins W cfg depth input s -> exists h0, Keeps.sound W cfg depth input (h0 := h0) s.
Proof.
  intros W cfg depth input ok s [->|[c [src [-> [P J]]]]]; [exists fresh; exact (sound_of ok (reach_start W cfg depth input))|exact (every_moment_of_a_job_is_sound W c src input ok P depth s J)].
Qed.

(** So what is proved of runs with losses holds wherever ranks began. *)
Theorem all_that_is_reached_follows_a_sound_state : forall W cfg depth input, setting_ok W cfg -> forall s, reached W cfg depth input s -> under_way W cfg depth input s.
Proof.
  intros W cfg depth input ok s [s0 [n [B P]]]. destruct (begins_sound W cfg depth input ok s0 B) as [h0 So].
  exact (under_way_on W cfg depth input ok s0 n s P (sound_under_way W cfg depth input s0 So)).
Qed.

Theorem wherever_ranks_begin_every_schedule_ends_within_the_bound : forall W cfg depth input, setting_ok W cfg -> forall s n u, begins W cfg depth input s ->
  (forall r, r < W -> running s r = false) -> lossy_path W cfg depth input s n u -> n <= bound W cfg input + W.
Proof.
  intros W cfg depth input ok s n u B Q. destruct (begins_sound W cfg depth input ok s B) as [h0 So]. exact (every_lossy_path_is_bounded W cfg depth input ok s n u So Q).
Qed.
