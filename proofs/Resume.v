(** RESUME (R10): what a rank saves, and what it is when that is loaded again.

    [save] and [load] are those of odb_ref/core/resume.py. What is saved is where the rank's round began, as REPLAY has it: a function
    of the samples and of what was exchanged, not of the moment at which it is saved. Loaded again, it makes a rank of which
    everything is true that Replay.v rests on. That a whole job which is loaded plans what the others planned is not proved here. For
    another number of ranks, what a checkpoint calls taken is what was taken; Rest.v shares out the rest. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Age Prompt Replay Rest.
Import ListNotations.

(** ** What is saved, and loaded *)

Record round_start := mkStart {
  b_round : nat; b_read : nat; b_ended : bool; b_carried : list sample; b_marks : list nat; b_planned : nat; b_gsum : nat }.

(** compute_round_start: [b_carried] holds the samples of which the Python keeps the positions, and reads them again (A9). *)
Definition save (u : state) : round_start :=
  let rd := last (marks u) 0 in
  mkStart (round u) rd (ended u && (read u =? rd)) (filter (fun x => pos x <? rd) (window u)) (marks u) (planned u) (gsum u).

(** resume, before anything is posted. [before] is a ghost: the steps of earlier rounds, which this rank had taken. *)
Definition place (c : config) (before : list Machine.step) (b : round_start) : state :=
  mkState FILL (b_round b) (b_read b) (b_ended b) (if b_ended b then 0 else c_window c (b_round b) - length (b_carried b)) (b_carried b) (b_marks b)
    [] [] [] true (b_planned b) (b_gsum b) [] [] before None false false None None None.

Definition load (c : config) (rank : nat) (before : list Machine.step) (b : round_start) : state := post c rank (place c before b).

(** ** One rank *)

Lemma last_of_last_n : forall (l : list nat) n x d, 1 <= n -> last (last_n n (l ++ [x])) d = x.
Proof.
  intros l n x d H. unfold last_n. rewrite app_length, skipn_app. simpl. replace (length l + 1 - n - length l) with 0 by lia. simpl. apply last_last.
Qed.

Section Rank.
Variable c : config.
Variable eager : bool.
Variable inp : list sample.
Hypothesis OK : config_ok c.
Hypothesis placed : forall i x, nth_error inp i = Some x -> pos x = i.
Notation history := (history c).
Notation view_of := (view_of c eager inp).

(** What a view says of reads and marks. *)
Definition wants (h : hist) (v : view) : Prop :=
  last (v_marks v) 0 = v_read v /\
  match h_kind h with
  | NOffer => v_want v = if v_ended v then 0 else c_window c (h_round h) - length (v_window v)
  | NCount _ => v_want v = if v_ended v then 0 else c_window c (S (h_round h)) - length (v_window v)
  | _ => True
  end.

Lemma views_want : forall rs, wants (history rs) (view_of rs).
Proof.
  induction rs as [|x rs [M Wa]] using rev_ind; [split; [reflexivity|simpl; lia]|]. rewrite history_snoc, view_snoc. unfold wants, h_step, next_view.
  destruct (h_kind (history rs)) as [|t| |o l] eqn:K; destruct x as [a|cs|r]; simpl; rewrite ?K; auto.
  - destruct (is_bad a); [simpl; auto|]. destruct (o_stop_rank a) as [q|]; [simpl; auto|]. destruct (target c a) as [|n]; [simpl; auto|]. simpl h_kind. simpl v_marks. cbn [v_read v_want v_ended v_window h_round].
    split; [apply last_of_last_n, (ok_age _ OK)|reflexivity].
  - destruct (failure_of r); simpl; rewrite ?K; auto.
Qed.


Lemma in_firstn : forall (l : list sample) n x, In x (firstn n l) -> exists i, i < n /\ nth_error l i = Some x.
Proof.
  induction l as [|y l IH]; intros n x H; [rewrite firstn_nil in H; destruct H|]. destruct n; [destruct H|]. destruct H as [->|H]; [exists 0; split; [lia|reflexivity]|].
  destruct (IH n x H) as [i [L E]]. exists (S i). split; [lia|exact E].
Qed.

Lemma in_skipn : forall (l : list sample) n x, In x (skipn n l) -> exists i, n <= i /\ nth_error l i = Some x.
Proof.
  induction l as [|y l IH]; intros n x H; [rewrite skipn_nil in H; destruct H|]. destruct n.
  - apply In_nth_error in H as [i E]. exists i. split; [lia|exact E].
  - destruct (IH n x H) as [i [L E]]. exists (S i). split; [lia|exact E].
Qed.

Lemma filter_all : forall (f : sample -> bool) l, (forall x, In x l -> f x = true) -> filter f l = l.
Proof. induction l as [|x l IH]; intros H; [reflexivity|]. simpl. rewrite (H x) by (left; reflexivity). f_equal. apply IH. intros y Hy. apply H. right. exact Hy. Qed.
Lemma filter_none : forall (f : sample -> bool) l, (forall x, In x l -> f x = false) -> filter f l = [].
Proof. induction l as [|x l IH]; intros H; [reflexivity|]. simpl. rewrite (H x) by (left; reflexivity). apply IH. intros y Hy. apply H. right. exact Hy. Qed.

Section Saved.
Variables (h : hist) (v : view) (rank : nat) (u : state).
Hypothesis K : core c c rank inp h u.
Hypothesis Im : image c eager inp h v u.
Hypothesis Wa : wants h v.
Hypothesis Kind : h_kind h = NOffer.
Hypothesis Quota : is_quota_met c (h_samples h) = false.
Hypothesis Ph : at_phase u = FILL \/ at_phase u = OFFER.

Lemma saved_alive : alive h.
Proof. unfold alive. rewrite Kind. exact I. Qed.

Lemma saved_cons : Permutation (samples_of (v_steps v) ++ v_window v) (firstn (v_read v) inp) /\ v_read v <= length inp.
Proof.
  destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx _]]]]. pose proof (k_cons _ _ _ _ _ _ K) as C. pose proof (k_read _ _ _ _ _ _ K) as Le.
  rewrite (k_aligned _ _ _ _ _ _ K) in C by (destruct Ph; congruence). rewrite Wx, Rx, firstn_add, <- Fx, (i_steps _ _ _ _ _ _ Im) in C. simpl in C. rewrite app_assoc in C.
  split; [apply Permutation_app_inv_r in C; exact C|lia].
Qed.

Lemma saved_fields : b_round (save u) = h_round h /\ b_read (save u) = v_read v /\ b_carried (save u) = v_window v /\ b_marks (save u) = v_marks v /\
  b_planned (save u) = length (h_steps h) /\ b_gsum (save u) = h_samples h.
Proof.
  destruct Wa as [M _]. pose proof saved_cons as [C _]. destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx _]]]].
  unfold save. simpl. rewrite (i_marks _ _ _ _ _ _ Im saved_alive), M. split; [apply (k_round _ _ _ _ _ _ K)|]. split; [reflexivity|].
  split; [|split; [reflexivity|split; [apply (k_planned _ _ _ _ _ _ K)|apply (k_gsum _ _ _ _ _ _ K)]]].
  rewrite Wx, filter_app, filter_all, filter_none, app_nil_r; [reflexivity| |].
  - intros y Hy. apply Nat.ltb_ge. rewrite Fx in Hy. assert (Hs : In y (skipn (v_read v) inp)) by (rewrite <- (firstn_skipn (length x)); apply in_or_app; left; exact Hy).
    apply in_skipn in Hs as [i [L E]]. rewrite (placed i y E). exact L.
  - intros y Hy. apply Nat.ltb_lt. assert (Hf : In y (firstn (v_read v) inp)) by (apply (Permutation_in _ C), in_or_app; right; exact Hy).
    apply in_firstn in Hf as [i [L E]]. rewrite (placed i y E). exact L.
Qed.

Lemma saved_reading : forall before, reading eager inp v (place c before (save u)) /\ (b_ended (save u) = true -> v_read v = length inp).
Proof.
  intros before. destruct saved_fields as [F1 [F2 [F3 _]]]. destruct Wa as [M Wn]. rewrite Kind in Wn. destruct (i_window _ _ _ _ _ _ Im saved_alive Quota) as [x [Wx [Rx [Fx [Lx C]]]]].
  assert (Be : b_ended (save u) = ended u && (read u =? v_read v)) by (unfold save; simpl; rewrite (i_marks _ _ _ _ _ _ Im saved_alive), M; reflexivity).
  split.
  - exists []. unfold place. cbn [window read ended wanted length]. rewrite F2, F3, app_nil_r, F1. split; [reflexivity|]. split; [lia|]. split; [reflexivity|]. split; [lia|].
    rewrite Be. destruct (v_ended v) eqn:E.
    + destruct C as [-> [En _]]. simpl in Rx. rewrite En, Rx, Nat.add_0_r, Nat.eqb_refl. auto.
    + destruct (ended u) eqn:En; [|simpl; split; [lia|auto]]. destruct C as [_ [Re Le]]. destruct (read u =? v_read v) eqn:Q; simpl; [|split; [lia|auto]]. apply Nat.eqb_eq in Q.
      assert (X : x = []) by (destruct x; [reflexivity|simpl in Rx; lia]). subst x. split; [reflexivity|]. split; [lia|]. destruct eager; simpl in Le; lia.
  - rewrite Be. intros Z. apply andb_true_iff in Z as [Z1 Z2]. apply Nat.eqb_eq in Z2. rewrite <- Z2. apply (k_ended _ _ _ _ _ _ K Z1).
Qed.

End Saved.
End Rank.

(** ** The job *)

Section Resume.
Variable W : nat.
Variable c : config.
Variable eager : nat -> bool.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W (fun _ => c).
Hypothesis placed : forall r i x, r < W -> nth_error (input r) i = Some x -> pos x = i.
Notation history := (history c).
Notation replays := (Replay.replays W c eager input).
Notation view_at := (fun s r => view_of c (eager r) (input r) (seen s r)).

(** A rank that saves: it has begun a round that is not yet agreed on, and the quota is not met. *)
Record saves (d : nat -> nat) (s : sys) (r : nat) : Prop := {
  sv_run : replays d s;
  sv_rank : r < W;
  sv_phase : at_phase (rank_of s r) = FILL \/ at_phase (rank_of s r) = OFFER;
  sv_quota : is_quota_met c (gsum (rank_of s r)) = false }.

Lemma saves_say : forall d s r, saves d s r -> let h := history (seen s r) in
  core c c r (input r) h (rank_of s r) /\ image c (eager r) (input r) h (view_at s r) (rank_of s r) /\ h_kind h = NOffer /\ is_quota_met c (h_samples h) = false.
Proof.
  intros d s r [Rp H Ph Qu] h. pose proof (replays_tell W c eager input ok d s Rp) as T. pose proof (g_core _ _ _ _ _ (tell_invariant _ _ _ _ _ _ T) r H) as K.
  change (System.hist_of (fun _ => c) s r) with h in K. split; [exact K|]. split; [exact (tell_images _ _ _ _ _ _ T r H)|]. split.
  - pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. destruct Ph as [P|P]; rewrite P in Kk; exact Kk.
  - rewrite <- (k_gsum _ _ _ _ _ _ K). exact Qu.
Qed.

(** RESUME: what is saved says where the round began. It does not depend on what was read since. *)
Theorem what_a_rank_saves_is_where_its_round_began : forall d s r, saves d s r ->
  let b := save (rank_of s r) in let h := history (seen s r) in let v := view_at s r in
  b_round b = h_round h /\ b_read b = v_read v /\ b_carried b = v_window v /\ b_marks b = v_marks v /\ b_planned b = length (h_steps h) /\ b_gsum b = h_samples h.
Proof.
  intros d s r Sv. destruct (saves_say d s r Sv) as [K [Im [Kd Qu]]]. pose proof (configs_ok _ _ ok r (sv_rank _ _ _ Sv)) as C.
  apply (saved_fields c (eager r) (input r) (fun i x => placed r i x (sv_rank _ _ _ Sv)) _ _ r _ K Im (views_want c (eager r) (input r) C _) Kd Qu (sv_phase _ _ _ Sv)).
Qed.

(** RESUME: loaded again, it makes a rank whose steps, window, marks and reads are those that the samples and what was exchanged
    demand ([image], which all of REPLAY rests on). *)
Theorem a_rank_that_is_loaded_is_what_its_view_says : forall d s r, saves d s r ->
  image c (eager r) (input r) (history (seen s r)) (view_at s r) (load c r (steps_of (rank_of s r)) (save (rank_of s r))).
Proof.
  intros d s r Sv. destruct (saves_say d s r Sv) as [K [Im [Kd Qu]]]. pose proof (configs_ok _ _ ok r (sv_rank _ _ _ Sv)) as C. pose proof (views_want c (eager r) (input r) C (seen s r)) as Wa.
  destruct (what_a_rank_saves_is_where_its_round_began d s r Sv) as [_ [_ [_ [F4 _]]]]. unfold load. set (u := place c (steps_of (rank_of s r)) (save (rank_of s r))).
  destruct (part_post c r u) as [P1 P2]. apply (image_part c (eager r) (input r) _ _ u); [exact P1|exact P2|apply post_fair|]. constructor.
  - unfold u, steps_of. simpl. rewrite app_nil_r. apply (i_steps _ _ _ _ _ _ Im).
  - intros t Ht. rewrite Kd in Ht. discriminate.
  - intros _. exact F4.
  - intros _ _. apply (saved_reading c (eager r) (input r) (fun i x => placed r i x (sv_rank _ _ _ Sv)) _ _ r _ K Im Wa Kd Qu (sv_phase _ _ _ Sv)).
  - intros X. discriminate.
Qed.

(** The checkpoint of a rank that has taken the samples at the positions [t] of the round: see [Rest.checkpoint]. *)
Definition checkpoint_of (b : round_start) (t : list nat) : checkpoint := mkCheckpoint (b_read b) (map pos (b_carried b)) t.

(** RESUME, by another number of ranks: a checkpoint calls a position taken exactly when it is in a step of an earlier round, or
    among those taken of this one. So it is sound, and Rest.v shares out the others. *)
Theorem a_checkpoint_tells_what_was_taken : forall d s r t, saves d s r ->
  let k := checkpoint_of (save (rank_of s r)) t in
  sound (length (input r)) k /\
  ((forall p, In p t -> k_read_samples k <= p \/ In p (k_carried k)) ->
   forall p, is_taken k p = true <-> In p (map pos (samples_of (steps_of (rank_of s r)))) \/ In p t).
Proof.
  intros d s r t Sv k. destruct (saves_say d s r Sv) as [K [Im [Kd Qu]]]. pose proof (sv_rank _ _ _ Sv) as H.
  destruct (what_a_rank_saves_is_where_its_round_began d s r Sv) as [_ [F2 [F3 _]]].
  destruct (saved_cons c (eager r) (input r) _ _ r _ K Im Kd Qu (sv_phase _ _ _ Sv)) as [Cs Le]. rewrite <- (i_steps _ _ _ _ _ _ Im) in Cs.
  unfold k, checkpoint_of, sound, is_taken. cbn [k_read_samples k_carried k_taken]. rewrite F2, F3.
  set (v := view_at s r) in *. set (rd := v_read v) in *. set (S := map pos (samples_of (steps_of (rank_of s r)))). set (w := map pos (v_window v)).
  assert (Ps : Permutation (S ++ w) (seq 0 rd)).
  { unfold S, w. rewrite <- map_app, (Permutation_map pos Cs). assert (X : map pos (firstn rd (input r)) = seq 0 rd); [|rewrite X; reflexivity].
    apply nth_error_ext. intros i. destruct (Nat.lt_ge_cases i rd) as [L|L].
    - destruct (nth_error (input r) i) as [x|] eqn:E; [|apply nth_error_None in E; lia]. assert (Ef : nth_error (firstn rd (input r)) i = Some x).
      { rewrite <- (firstn_skipn rd (input r)) in E. rewrite nth_error_app1 in E by (rewrite firstn_length; lia). exact E. }
      rewrite (map_nth_error pos _ _ Ef), (placed r i x H E). symmetry. rewrite nth_error_nth' with (d := 0) by (rewrite seq_length; exact L). rewrite seq_nth by exact L. reflexivity.
    - assert (X1 : nth_error (map pos (firstn rd (input r))) i = None) by (apply nth_error_None; rewrite map_length, firstn_length; lia).
      rewrite X1. symmetry. apply nth_error_None. rewrite seq_length. exact L. }
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

End Resume.
