(** One rank against the shared history.

    [hist] holds what follows from the results of the exchange alone: the number of steps in each round, their counts, how many are
    released, and how the epoch ends. [core] relates a rank's state to the history of the results that the rank has received. All ranks
    receive prefixes of one list of results, so what follows from [hist] is equal on all ranks: that is ALIGN. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine.
Import ListNotations.

(** ** What a configuration must meet *)

(** True of every agreement that a target rule sees. *)
Record sane (a : offer) : Prop := {
  sane_samples : 1 <= o_samples_max a;
  sane_groups : 1 <= o_groups_max a <= o_samples_max a;
  sane_due : o_due_max a <= o_groups_max a;
  sane_groups_min : forall g, o_groups_min a = Some g -> 1 <= g <= o_groups_max a }.

(** The bounds of odb_ref/core/batching/rules.py. *)
Definition within_bounds (rule : offer -> nat) : Prop :=
  forall a, sane a -> Nat.max 1 (o_due_max a) <= rule a <= o_samples_max a.

Record config_ok (c : config) : Prop := {
  ok_group_perm : forall b w, Permutation (concat (c_group c b w)) w;
  ok_group_nonempty : forall b w, Forall (fun g => g <> []) (c_group c b w);
  ok_align_length : forall k gs t d, length (fst (c_align c k gs t d)) = t;
  ok_align_perm : forall k gs t d, Permutation (concat (fst (c_align c k gs t d)) ++ snd (c_align c k gs t d)) (concat gs);
  ok_align_work : forall k gs t d, Forall (fun g => g <> []) gs -> t <= length (concat gs) ->
    Forall (fun g => g <> []) (fst (c_align c k gs t d));
  ok_align_due : forall k gs t d, count_due d gs <= t -> Forall (fun x => d <= pos x) (snd (c_align c k gs t d));
  ok_window : forall r k, has_steps c k = true -> 1 <= c_window c r k;
  ok_updates : 1 <= update_rounds c;
  ok_age : 1 <= c_max_age c;
  ok_rule : within_bounds (c_rule c) }.

(** ** The shared history *)

Inductive kind := NOffer | NCount (t : nat) | NReport | NClosed (o : outcome_kind) (lim : nat).

Notation shared_step := (nat * nat * counts)%type.
Definition shared (s : step) : shared_step := (s_number s, s_round s, s_counts s).

Record hist := mkHist { h_kind : kind; h_round : nat; h_steps : list shared_step; h_released : nat }.

Definition h_initial : hist := mkHist NOffer 0 [] 0.
Definition h_samples (h : hist) : nat := sum_over (fun x => n_samples (snd x)) (h_steps h).

Fixpoint make_shared (number rd : nat) (cs : list counts) : list shared_step :=
  match cs with [] => [] | x :: r => (number, rd, x) :: make_shared (S number) rd r end.

Definition h_step (c : config) (h : hist) (x : result) : hist :=
  match h_kind h, x with
  | NOffer, Agreed a =>
      if is_bad a then mkHist NReport (h_round h) (h_steps h) (h_released h)
      else match o_stop_rank a with
      | Some r => let n := match o_stop_step a with Some n => n | None => 0 end in
                  mkHist (NClosed (Stopped r n) n) (h_round h) (h_steps h) (h_released h)
      | None => mkHist (match target c a with Closes => NClosed Complete (length (h_steps h)) | Makes t => NCount t end)
                       (h_round h) (h_steps h) (length (h_steps h))
      end
  | NCount _, Counted cs =>
      let n := cut c (h_samples h) cs in
      mkHist NOffer (S (h_round h)) (h_steps h ++ make_shared (length (h_steps h)) (h_round h) (firstn n cs)) (h_released h)
  | NReport, Reported rs =>
      match failure_of rs with
      | Some o => mkHist (NClosed o (h_released h)) (h_round h) (h_steps h) (h_released h)
      | None => h
      end
  | _, _ => h
  end.

(** Only sums add steps. *)
Lemma only_sums_add_steps : forall c h x, (forall cs, x <> Counted cs) -> h_steps (h_step c h x) = h_steps h.
Proof.
  intros c h [a|cs|rs] Nc; [|edestruct Nc; reflexivity|]; unfold h_step; destruct (h_kind h); try reflexivity;
    [destruct (is_bad a); [|destruct (o_stop_rank a)]|destruct (failure_of rs)]; reflexivity.
Qed.

(** ** The invariant of one rank *)

Definition steps_of (s : state) : list step := taken s ++ queue s ++ released s ++ plan s.
Definition released_of (s : state) : list step := taken s ++ queue s ++ released s.
Definition samples_of (xs : list step) : list sample := concat (map s_group xs).

Record offer_ok (c : config) (rank : nat) (s : state) (o : offer) : Prop := {
  of_round : o_round_min o = round s /\ o_round_max o = round s;
  of_print : o_print_min o = c_print c /\ o_print_max o = c_print c;
  of_samples : o_samples_min o = o_samples_max o;
  of_flag : o_ready o = false -> o_failed o <> None \/ o_stop_rank o <> None;
  of_failed : forall r, o_failed o = Some r -> r = rank /\ failure s <> None;
  of_stop : forall r, o_stop_rank o = Some r -> r = rank /\ stopped s = true;
  of_step : o_stop_rank o <> None -> o_stop_step o <> None;
  of_budget : o_budget o = c_accepts c rank (round s);
  of_ready : o_ready o = true ->
    collated s = true /\ wanted s = 0 /\ groups s = form_groups c s /\
    o_samples_max o = (if is_quota_met c (gsum s) then 0 else held_samples c s) /\
    o_groups_max o = length (groups s) /\
    o_groups_min o = (if ended s || is_some (c_updates c) then None else Some (groups_to_emit c (budget s) (groups s))) /\
    o_due_max o = count_due (due_before c s) (groups s) }.

Definition kind_ok (c c0 : config) (h : hist) (s : state) : Prop :=
  match at_phase s with
  | FILL | OFFER => h_kind h = NOffer
  | COUNT => h_kind h = NCount (length (aligned s)) /\ c = c0
  | REPORT => h_kind h = NReport
  | DRAIN | DONE => exists o lim, h_kind h = NClosed o lim /\ ended_as s = Some o
  end.

(** 1 in COUNT, where a rank asks for the window of the next round, and 0 elsewhere. *)
Definition in_count (s : state) : nat := match at_phase s with COUNT => 1 | _ => 0 end.

(** The round whose window a rank holds: in COUNT it is the next round's. *)
Definition coming (s : state) : nat := round s + in_count s.

(** The window has or awaits a sample, or the source has ended, or the window is of a round that forms no steps. *)
Definition has_more (c : config) (s : state) : Prop := ended s = true \/ 1 <= length (window s) + wanted s \/ has_steps c (coming s) = false.

Record core (c c0 : config) (rank : nat) (inp : list sample) (h : hist) (s : state) : Prop := {
  k_round : round s = h_round h;
  k_kind : kind_ok c c0 h s;
  k_steps : map shared (steps_of s) = h_steps h;
  k_released : length (released_of s) = h_released h;
  k_planned : planned s = length (h_steps h);
  k_gsum : gsum s = h_samples h;
  k_cons : Permutation (samples_of (steps_of s) ++ concat (aligned s) ++ window s) (firstn (read s) inp);
  k_read : read s <= length inp;
  k_ended : ended s = true -> read s + wanted s = length inp /\ (c_shares c = false -> wanted s = 0);
  k_aligned : at_phase s <> COUNT -> aligned s = [];
  k_plan : at_phase s = COUNT -> plan s = [];
  k_window : has_more c s \/ at_phase s = COUNT /\ c_shares c = true;
  k_stop : stopped s = true -> exists l, limit s = Some l /\ l <= length (taken s);
  k_free : stopped s = false -> limit s = match h_kind h with NClosed _ l => Some l | _ => None end;
  k_offer : at_phase s = OFFER -> exists o, posted s = Some (MOffer o) /\ offer_ok c rank s o;
  k_count : at_phase s = COUNT -> posted s = Some (MCounts (map count_group (aligned s)));
  k_report : at_phase s = REPORT -> exists r, posted s = Some (MReport r) /\ r_rank r = rank /\ r_print r = c_print c }.

Lemma more_unless_counting : forall c c0 rank inp h s, core c c0 rank inp h s -> at_phase s <> COUNT -> has_more c s.
Proof. intros c c0 rank inp h s K P. destruct (k_window _ _ _ _ _ _ K) as [X|[X _]]; [exact X|contradiction]. Qed.

(** A rank that is ready and holds nothing has read its source to the end. *)
Lemma held_nothing : forall c c0 rank inp h s, core c c0 rank inp h s -> at_phase s <> COUNT -> wanted s = 0 -> held_samples c s = 0 -> window s = [] /\ ended s = true.
Proof.
  intros c c0 rank inp h s K P Wa H. unfold held_of in H. destruct (c_updates c) eqn:U; simpl in H.
  - destruct (ended s); cbn [negb] in H; destruct (window s); simpl in H; auto; discriminate.
  - destruct (window s) as [|x w] eqn:W; [|discriminate]. split; [reflexivity|]. destruct (more_unless_counting _ _ _ _ _ _ K P) as [M|[M|M]]; [exact M|rewrite W, Wa in M; simpl in M; lia|].
    unfold has_steps, update_rounds in M. rewrite U, Nat.mod_1_r in M. discriminate.
Qed.

(** Only a step into COUNT or out of it changes whose window is coming. *)
Lemma more_stays : forall c s t, ended t = ended s -> window t = window s -> wanted t = wanted s -> round t = round s -> in_count t = in_count s ->
  has_more c s -> has_more c t.
Proof. intros c s t E1 E2 E3 E4 E5. unfold has_more, coming. rewrite E1, E2, E3, E4, E5. auto. Qed.

(** The part of the invariant that tells what a rank waits for. *)
Record tight (depth : nat) (s : state) : Prop := {
  t_queue : length (queue s) <= depth;
  t_released : released s <> [] -> length (queue s) = depth \/ exists l, limit s = Some l /\ l <= length (taken s) + length (queue s);
  t_fill : at_phase s = FILL -> must_end s = false /\ (is_ready s = false \/ (released s <> [] /\ urged s = false));
  t_drain : at_phase s = DRAIN -> released s <> [] /\ (forall l, limit s = Some l -> length (taken s) + length (queue s) < l);
  t_done : at_phase s = DONE -> released s = [] \/ exists l, limit s = Some l /\ l <= length (taken s) + length (queue s) }.

(** The first two of these alone: what is left to deliver has no room, or may not be delivered. *)
Definition loose (depth : nat) (s : state) : Prop := length (queue s) <= depth /\
  (released s <> [] -> length (queue s) = depth \/ exists l, limit s = Some l /\ l <= length (taken s) + length (queue s)).

(** ** Numbers *)

Definition numbered_from (n : nat) (xs : list shared_step) : Prop :=
  forall i x, nth_error xs i = Some x -> fst (fst x) = n + i.

Lemma make_shared_length : forall cs n rd, length (make_shared n rd cs) = length cs.
Proof. induction cs; simpl; intros; auto. Qed.

Lemma make_shared_numbered : forall cs n rd, numbered_from n (make_shared n rd cs).
Proof.
  induction cs as [|y cs IH]; intros n rd i x H; simpl in H; [destruct i; discriminate|].
  destruct i; simpl in H; [injection H as <-; simpl; lia|]. apply IH in H. lia.
Qed.

Lemma numbered_app : forall xs ys n, numbered_from n xs -> numbered_from (n + length xs) ys -> numbered_from n (xs ++ ys).
Proof.
  intros xs ys n Hx Hy i x H. destruct (lt_dec i (length xs)) as [L|L].
  - rewrite nth_error_app1 in H by assumption. apply Hx, H.
  - rewrite nth_error_app2 in H by lia. apply Hy in H. lia.
Qed.

Lemma h_step_numbered : forall c h x, numbered_from 0 (h_steps h) -> numbered_from 0 (h_steps (h_step c h x)).
Proof.
  intros c h [a|cs|rs] Na; try (rewrite only_sums_add_steps by discriminate; exact Na). unfold h_step. destruct (h_kind h); auto. apply numbered_app; [exact Na|apply make_shared_numbered].
Qed.

Lemma fold_ind : forall (A B : Type) (f : A -> B -> A) (P : A -> Prop) l a,
  P a -> (forall a b, P a -> P (f a b)) -> P (fold_left f l a).
Proof. induction l as [|b l IH]; simpl; intros; auto. Qed.

(** What had been planned when the ranks of a job began: nothing, or, if they were loaded ([Resume.v]), the steps of earlier rounds. *)
Record origin := mkOrigin {
  o_hist :> hist;
  o_offers : h_kind o_hist = NOffer;
  o_numbers : numbered_from 0 (h_steps o_hist);
  o_releases : h_released o_hist <= length (h_steps o_hist) }.

Lemma nothing_numbered : numbered_from 0 [].
Proof. intros [|i] x H; discriminate. Qed.

Definition fresh : origin := mkOrigin h_initial eq_refl nothing_numbered (le_n 0).

Definition history_from (h0 : origin) (c : config) (rs : list result) : hist := fold_left (h_step c) rs h0.
Notation history := (history_from fresh).

Lemma history_numbered : forall {h0} c rs, numbered_from 0 (h_steps (history_from h0 c rs)).
Proof. intros. unfold history_from. apply fold_ind; [apply o_numbers|intros; apply h_step_numbered; assumption]. Qed.

Lemma history_snoc : forall h0 c rs x, history_from h0 c (rs ++ [x]) = h_step c (history_from h0 c rs) x.
Proof. intros. unfold history_from. rewrite fold_left_app. reflexivity. Qed.

(** The step at position [i] of a rank has number [i]. *)
Lemma step_number : forall c c0 rank inp h s i x, core c c0 rank inp h s -> numbered_from 0 (h_steps h) ->
  nth_error (steps_of s) i = Some x -> s_number x = i.
Proof.
  intros c c0 rank inp h s i x K Na H. apply (map_nth_error shared) in H. rewrite (k_steps _ _ _ _ _ _ K) in H.
  apply Na in H. exact H.
Qed.

(** ** Delivering *)

Lemma take_room_spec : forall lim ob room, let m := take_room room lim ob in
  ob = fst m ++ snd m /\ length (fst m) <= room /\ (snd m = [] \/ length (fst m) = room \/ exists x r, snd m = x :: r /\ below lim (s_number x) = false).
Proof.
  intros lim. induction ob as [|x ob IH]; intros [|room]; simpl; auto with arith. destruct (below lim (s_number x)) eqn:B.
  - specialize (IH room). simpl in IH. destruct (take_room room lim ob) as [d e]. simpl in *. destruct IH as [-> [L C]]. repeat split; [lia|]. destruct C as [C|[C|C]]; auto.
  - simpl. repeat split; [lia|right; right; eauto].
Qed.

Lemma deliver_eq : forall depth s, exists d e,
  released s = d ++ e /\ deliver depth s = set_released e (set_queue (queue s ++ d) s) /\ length d <= depth - length (queue s) /\
  (e = [] \/ length d = depth - length (queue s) \/ exists x r, e = x :: r /\ below (limit s) (s_number x) = false).
Proof. intros. do 2 eexists. destruct (take_room_spec (limit s) (released s) (depth - length (queue s))) as [E [L C]]. eauto. Qed.

Lemma deliver_steps : forall depth s, steps_of (deliver depth s) = steps_of s /\ released_of (deliver depth s) = released_of s.
Proof.
  intros. destruct (deliver_eq depth s) as [d [e [E [-> _]]]]. unfold steps_of, released_of. simpl. rewrite E, !app_assoc. auto.
Qed.

Lemma deliver_core : forall c c0 rank inp h depth s, core c c0 rank inp h s -> core c c0 rank inp h (deliver depth s).
Proof.
  intros c c0 rank inp h depth s K. pose proof (deliver_steps depth s) as [S1 S2].
  destruct (deliver_eq depth s) as [d [e [E [Eq _]]]]. destruct K. constructor; try rewrite S1; try rewrite S2; rewrite ?Eq; auto.
  intros P. destruct (k_offer0 P) as [o [Po O]]. exists o. split; [exact Po|]. destruct O. constructor; auto.
Qed.

Lemma deliver_loose : forall c c0 rank inp h depth s, core c c0 rank inp h s -> numbered_from 0 (h_steps h) -> length (queue s) <= depth -> loose depth (deliver depth s).
Proof.
  intros c c0 rank inp h depth s K Na Q. destruct (deliver_eq depth s) as [d [e [E [Eq [L C]]]]]. rewrite Eq. unfold loose. simpl.
  rewrite app_length. split; [lia|]. intros NE. destruct C as [C|[C|[x [r [-> B]]]]]; [easy|left; lia|right].
  assert (Nx : s_number x = length (taken s) + (length (queue s) + length d)).
  { apply (step_number c c0 rank inp h s _ x K Na). unfold steps_of. rewrite E, <- !app_assoc.
    rewrite nth_error_app2 by lia. rewrite nth_error_app2 by lia. rewrite nth_error_app2 by lia.
    replace (_ - _) with 0 by lia. reflexivity. }
  unfold below in B. destruct (limit s) as [l|]; [|discriminate]. apply Nat.ltb_ge in B. exists l. split; [reflexivity|lia].
Qed.

(** ** Posting *)

Lemma post_eq : forall c rank s,
  post c rank s = s /\ (at_phase s = FILL -> must_end s = false /\ (is_ready s = false \/ (released s <> [] /\ urged s = false)))
  \/ at_phase s = FILL /\ (must_end s = true \/ is_ready s = true) /\
     post c rank s = set_phase OFFER (set_groups (form_groups c s) (set_posted (Some (MOffer (compute_offer c rank s (form_groups c s)))) s)).
Proof.
  intros. unfold post. destruct (posts s) eqn:R; [right|left; split; [destruct s; reflexivity|intros P]]; unfold posts in R.
  - destruct (at_phase s); try discriminate. split; [reflexivity|]. split; [|reflexivity]. destruct (must_end s); [auto|]. right. destruct (is_ready s); [reflexivity|discriminate].
  - rewrite P in R. apply orb_false_iff in R as [R1 R2]. split; [exact R1|]. destruct (is_ready s); [right|auto]. simpl in R2. apply orb_false_iff in R2 as [R2 R3].
    apply orb_false_iff in R2 as [R2 _]. split; [destruct (released s); discriminate|exact R3].
Qed.

Lemma post_core : forall c c0 rank inp h s, core c c0 rank inp h s -> core c c0 rank inp h (post c rank s).
Proof.
  intros c c0 rank inp h s K. destruct (post_eq c rank s) as [[-> _]|[P [R ->]]]; [assumption|].
  destruct K. constructor; simpl; auto; try discriminate.
  - unfold kind_ok in *. simpl. rewrite P in k_kind0. assumption.
  - intros _. apply k_aligned0. rewrite P. discriminate.
  - destruct k_window0 as [X|[X _]]; [left; apply (more_stays c s); auto; unfold in_count; rewrite P; reflexivity|congruence].
  - intros _. eexists. split; [reflexivity|]. constructor; simpl; auto.
    + intros NR. destruct R as [R|R]; [|unfold is_ready in *; simpl in *; congruence]. unfold must_end in R.
      apply orb_true_iff in R as [R|R]; rewrite R; [left|right]; discriminate.
    + intros r Hr. destruct (failure s); simpl in Hr; [|discriminate]. injection Hr as <-. split; [reflexivity|discriminate].
    + intros r Hr. destruct (stopped s); [|discriminate]. injection Hr as <-. auto.
    + destruct (stopped s); [discriminate|auto].
    + intros RT. unfold is_ready in RT. simpl in RT. apply andb_true_iff in RT as [R1 R2]. apply Nat.eqb_eq in R2. repeat split; auto.
Qed.

Lemma post_tight : forall c rank depth s, at_phase s <> DRAIN -> at_phase s <> DONE -> loose depth s -> tight depth (post c rank s).
Proof.
  intros c rank depth s D1 D2 [Q O]. destruct (post_eq c rank s) as [[-> F]|[P [R ->]]]; constructor; simpl; auto; try easy.
Qed.

(** ** Draining *)

Lemma finish_eq : forall s, exists p, finish_when_drained s = set_phase p s /\ (p = at_phase s \/ p = DONE).
Proof. intros s. exists (if is_drained s then DONE else at_phase s). split; [reflexivity|]. destruct (is_drained s); auto. Qed.

Lemma drain_phase : forall d o l s, at_phase (drain d o l s) = DRAIN \/ at_phase (drain d o l s) = DONE.
Proof. intros. unfold drain. match goal with |- context[finish_when_drained ?u] => destruct (finish_eq u) as [p [-> [-> | ->]]]; auto end. Qed.

Ltac drains := match goal with
  | |- at_phase (drain ?d ?o ?l ?u) <> _ => destruct (drain_phase d o l u) as [-> | ->]; discriminate
  | P : at_phase (drain ?d ?o ?l ?u) = _ |- _ => destruct (drain_phase d o l u); congruence
  end.

Lemma finish_other : forall s, at_phase s <> DRAIN -> finish_when_drained s = s.
Proof. intros s P. unfold finish_when_drained, is_drained. destruct s as [p]. simpl in *. destruct p; try reflexivity. contradiction. Qed.

Lemma finish_core : forall c c0 rank inp h s, at_phase s = DRAIN -> core c c0 rank inp h s -> core c c0 rank inp h (finish_when_drained s).
Proof.
  intros c c0 rank inp h s P K. destruct (finish_eq s) as [p [-> C]].
  assert (X : p = DRAIN \/ p = DONE) by (rewrite P in C; exact C). destruct K. unfold kind_ok in *. rewrite P in *.
  constructor; simpl; auto; unfold kind_ok; simpl; destruct X as [-> | ->]; auto; try discriminate; try (intros; apply k_aligned0; discriminate);
    destruct k_window0 as [Y|[Y _]]; try discriminate; left; apply (more_stays c s); auto; unfold in_count; rewrite P; reflexivity.
Qed.

Lemma finish_tight : forall c c0 rank inp h depth s, core c c0 rank inp h s -> numbered_from 0 (h_steps h) -> at_phase s = DRAIN -> loose depth s ->
  tight depth (finish_when_drained s).
Proof.
  intros c c0 rank inp h depth s K Na P [Q O]. assert (Next : forall x r, released s = x :: r -> s_number x = length (taken s) + length (queue s)).
  { intros x r E. apply (step_number c c0 rank inp h s _ x K Na). unfold steps_of. rewrite E.
    rewrite nth_error_app2 by lia. rewrite nth_error_app2 by lia. replace (_ - _) with 0 by lia. reflexivity. }
  unfold finish_when_drained, is_drained. rewrite P. destruct (released s) as [|x r] eqn:E; [constructor; simpl; rewrite ?E; auto; discriminate|]. specialize (Next x r eq_refl).
  destruct (below (limit s) (s_number x)) eqn:B; constructor; simpl; rewrite ?E; auto; try discriminate.
  - intros _. split; [discriminate|]. intros l L. rewrite L in B. simpl in B. apply Nat.ltb_lt in B. lia.
  - intros _. right. unfold below in B. destruct (limit s) as [l|]; [|discriminate]. apply Nat.ltb_ge in B. exists l. split; [reflexivity|lia].
Qed.

(** ** What a rank does by itself *)

Lemma answer_or_own : forall e, (exists x, e = Got x) \/ (forall x, e <> Got x).
Proof. intros []; eauto; right; discriminate. Qed.

(** What an event other than a result changes, before the rank may post. *)
Definition moved (depth : nat) (s : state) (e : event) : state :=
  match e with
  | SamplesRead xs en full => set_read (read s + length xs) (set_ended (ended s || en) (set_wanted (if en || full then 0 else wanted s - length xs) (set_window (window s ++ xs) s)))
  | Collated => set_collated true s
  | StepTaken => finish_when_drained (deliver depth (set_taken (taken s ++ firstn 1 (queue s)) (set_queue (tl (queue s)) s)))
  | ConsumerStopped => finish_when_drained (set_limit (Some match limit s with Some m => Nat.min m (length (taken s)) | None => length (taken s) end) (set_stopped true s))
  | LocalFailed cause => set_failure (Some cause) s
  | Urged => set_urged true s
  | Got _ => s
  end.

(** When the event has this effect. *)
Definition granted (s : state) (e : event) : Prop :=
  match e with
  | SamplesRead xs en full => wanted s <> 0 /\ length xs <= wanted s /\ (full = true -> may_be_full xs en s = true) /\ (xs <> [] \/ en = true \/ full = true)
  | Collated => collated s = false
  | StepTaken => exists x q, queue s = x :: q /\ below (limit s) (s_number x) = true
  | ConsumerStopped => stopped s = false /\ at_phase s <> DONE
  | LocalFailed _ => is_ending s = false /\ failure s = None
  | Urged => is_ending s = false
  | Got _ => False
  end.

(** When the event has no effect. *)
Definition deaf (s : state) (e : event) : bool :=
  match e with
  | ConsumerStopped => match at_phase s with DONE => true | _ => stopped s end
  | LocalFailed _ => is_ending s || is_some (failure s)
  | Urged => is_ending s
  | _ => false
  end.

Lemma deaf_event : forall c r d s e, deaf s e = true -> transition c r d s e = Some s.
Proof. intros c r d s [xs en full| |x| | |cause|] D; simpl in *; try discriminate; [destruct (at_phase s); rewrite ?D; reflexivity|rewrite D; reflexivity..]. Qed.

Lemma granted_event : forall c r d s e, granted s e -> transition c r d s e = Some (post c r (moved d s e)).
Proof.
  intros c r d s [xs en full| |x| | |cause|] G; simpl in *; try contradiction.
  - destruct G as [G1 [G2 [G3 Nx]]]. replace (wanted s =? 0) with false by (symmetry; apply Nat.eqb_neq, G1). replace (wanted s <? length xs) with false by (symmetry; apply Nat.ltb_ge, G2).
    assert (F : full && negb (may_be_full xs en s) = false) by (destruct full; [rewrite G3; reflexivity|reflexivity]). rewrite F.
    destruct Nx as [Nx|[-> | ->]]; [destruct xs; [contradiction Nx; reflexivity|reflexivity]|destruct xs; reflexivity|destruct xs; [destruct en|]; reflexivity].
  - rewrite G. reflexivity.
  - destruct G as [x [q [Q B]]]. rewrite Q, B. reflexivity.
  - destruct G as [S D]. rewrite S. destruct (at_phase s); try reflexivity. contradiction.
  - destruct G as [-> ->]. reflexivity.
  - rewrite G. reflexivity.
Qed.

Lemma own_event : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t ->
  granted s e /\ t = post c r (moved d s e) \/ t = s /\ deaf s e = true.
Proof.
  intros c r d s e t NG E. destruct (deaf s e) eqn:D; [rewrite (deaf_event c r d s e D) in E; injection E as <-; auto|left].
  assert (G : granted s e).
  { destruct e as [xs en full| |x| | |cause|]; simpl in *.
    - destruct (wanted s =? 0) eqn:Wa; [discriminate|]. destruct (wanted s <? length xs) eqn:W2; [discriminate|]. simpl in E. destruct (is_nil xs && negb en && negb full) eqn:Nl; [discriminate|].
      destruct (full && negb (may_be_full xs en s)) eqn:Fu; [discriminate|]. apply Nat.eqb_neq in Wa. apply Nat.ltb_ge in W2.
      split; [exact Wa|]. split; [exact W2|]. split; [intros ->; simpl in Fu; apply negb_false_iff in Fu; exact Fu|]. destruct xs; [|left; discriminate]. destruct en, full; auto.
    - destruct (collated s); [discriminate|reflexivity].
    - edestruct NG. reflexivity.
    - destruct (queue s) as [|x q] eqn:Q; [discriminate|]. destruct (below (limit s) (s_number x)) eqn:B; [eauto|discriminate].
    - destruct (at_phase s); try discriminate; rewrite D; split; congruence.
    - destruct (is_ending s); [discriminate|]. destruct (failure s); [discriminate|auto].
    - exact D. }
  split; [exact G|]. rewrite (granted_event c r d s e G) in E. injection E as <-. reflexivity.
Qed.

Lemma moved_phase : forall d s e, at_phase (moved d s e) = at_phase s \/ (at_phase s = DRAIN /\ at_phase (moved d s e) = DONE).
Proof.
  assert (F : forall u, at_phase (finish_when_drained u) = at_phase u \/ (at_phase u = DRAIN /\ at_phase (finish_when_drained u) = DONE)).
  { intros u. destruct (at_phase u) eqn:P; try (left; rewrite finish_other; congruence). destruct (finish_eq u) as [p [-> [-> | ->]]]; auto. }
  intros d s [xs en full| |x| | |cause|]; try (left; reflexivity); unfold moved; match goal with |- at_phase (finish_when_drained ?u) = _ \/ _ => exact (F u) end.
Qed.
