(** FREE, for loaders, bounded output queues and trainers together: until all have finished, some transition is possible. With TERM,
    every schedule, fair or not, ends. *)
Require Import List Arith Lia Bool Permutation Decidable.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending.
Import ListNotations.

Lemma dec_true : forall b, decidable (b = true).
Proof. intros [|]; [left; reflexivity|right; discriminate]. Qed.

Lemma dec_some : forall (P : nat -> Prop) n, (forall r, decidable (P r)) -> decidable (exists r, r < n /\ P r).
Proof.
  intros P n D. induction n as [|n [[r [H E]]|IH]]; [right; intros [r [H _]]; lia|left; exists r; auto|].
  destruct (D n) as [E|E]; [left; exists n; auto|right]. intros [r [H F]]. destruct (Nat.eq_dec r n) as [->|NE]; [auto|apply IH; exists r; split; [lia|exact F]].
Qed.

Lemma dec_every : forall (P : nat -> Prop) n, (forall r, decidable (P r)) -> decidable (forall r, r < n -> P r).
Proof.
  intros P n D. destruct (dec_some (fun r => ~ P r) n) as [[r [H F]]|F]; [intros r; apply dec_not, D|right; auto|left].
  intros r H. destruct (D r) as [X|X]; [exact X|]. contradiction F. eauto.
Qed.

(** Decides statements built from comparisons of numbers, equations of booleans, and ranges over ranks. *)
Ltac decides := repeat first [apply dec_and|apply dec_or|apply dec_some; intro|apply dec_every; intro|apply dec_le|apply dec_lt|apply dec_eq_nat|apply dec_true].

Lemma dec_exists : forall (p : nat -> bool) n, (exists r, r < n /\ p r = true) \/ (forall r, r < n -> p r = false).
Proof.
  intros p n. destruct (dec_some (fun r => p r = true) n) as [E|E]; [intros r; apply dec_true|auto|right].
  intros r H. apply not_true_iff_false. intros P. apply E. eauto.
Qed.

Lemma min_exists : forall (f : nat -> nat) n, 1 <= n -> exists q, q < n /\ forall i, i < n -> f q <= f i.
Proof.
  induction n as [|n IH]; intros H; [lia|]. destruct n as [|n]; [exists 0; split; [lia|]; intros i Hi; replace i with 0 by lia; lia|].
  destruct IH as [q [Hq M]]; [lia|]. destruct (le_lt_dec (f q) (f (S n))) as [L|L].
  - exists q. split; [lia|]. intros i Hi. destruct (Nat.eq_dec i (S n)) as [->|NE]; [exact L|apply M; lia].
  - exists (S n). split; [lia|]. intros i Hi. destruct (Nat.eq_dec i (S n)) as [->|NE]; [lia|]. specialize (M i ltac:(lia)). lia.
Qed.

Lemma map_choice : forall (A B : Type) (f : A -> B) (P : A -> Prop) (l : list B), (forall x, In x l -> exists a, x = f a /\ P a) -> exists m, l = map f m /\ Forall P m.
Proof.
  induction l as [|x l IH]; intros H; [exists []; split; [reflexivity|constructor]|]. destruct (H x (or_introl eq_refl)) as [a [-> Pa]]. destruct IH as [m [-> Pm]]; [intros; apply H; right; assumption|].
  exists (a :: m). split; [reflexivity|constructor; assumption].
Qed.

(** The limit is the number of released steps, unless a consumer has stopped. *)
Lemma history_limit : forall {h0} c rs o l, h_kind (history_from h0 c rs) = NClosed o l -> (exists q n, o = Stopped q n) \/ l = h_released (history_from h0 c rs).
Proof.
  intros h0 c rs. unfold history_from. apply (fold_ind _ _ (h_step c) (fun h => forall o l, h_kind h = NClosed o l -> (exists q n, o = Stopped q n) \/ l = h_released h)).
  - rewrite o_offers. discriminate.
  - intros h x IH o l. unfold h_step. destruct (h_kind h) eqn:K; destruct x; simpl; rewrite ?K; try discriminate; try (intros E; eapply IH; exact E).
    + destruct (is_bad a); simpl; [discriminate|]. destruct (o_stop_rank a); simpl; [intros E; injection E as <- _; eauto|].
      destruct (target c a); [|discriminate]. intros E. injection E as <- <-. auto.
    + destruct (failure_of rs0) as [o1|]; simpl; [|congruence]. intros E. injection E as _ <-. auto.
Qed.

Lemma one_or_each : forall (P : Prop) (Q : nat -> Prop) n, (forall r, r < n -> P \/ Q r) -> P \/ forall r, r < n -> Q r.
Proof.
  induction n as [|n IH]; intros E; [right; intros; lia|]. destruct IH as [C|A]; [intros r H; apply E; lia|auto|]. destruct (E n (Nat.lt_succ_diag_r n)) as [C|B]; [auto|].
  right. intros r H. destruct (Nat.eq_dec r n) as [->|NE]; [exact B|apply A; lia].
Qed.

Section Coupled.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Hypothesis deep : forall r, r < W -> 1 <= depth r.
Notation step := (System.step W cfg depth input).
Context {h0 : origin}.
Notation invariant := (System.invariant W cfg depth input (h0 := h0)).
Notation sound := (Keeps.sound W cfg depth input (h0 := h0)).
Notation hist_of := (System.hist_from cfg h0).
Notation whole := (Facts.whole_from cfg h0).

(** Events that happen without a failure, a consumer that leaves, or an urge. *)
Definition unurged (l : label) : Prop := match l with LRank _ (ConsumerStopped | LocalFailed _ | Urged) => False | _ => True end.
(** The process that reads and collates for a failed rank may be gone, so its reads and collations may never happen. A draw comes with
    sums. *)
Definition served (s : sys) (l : label) : Prop := match l with
  | LRank r (SamplesRead _ _ _ | Collated) => failure (rank_of s r) = None
  | LDrawn r _ _ => at_phase (rank_of s r) = COUNT
  | _ => True
  end.
Definition unaided (s : sys) (l : label) : Prop := unurged l /\ served s l.
(** The driver urges once a consumer has left (assumption A6 of the spec). *)
Definition by_itself (s : sys) (l : label) : Prop :=
  match l with
  | LRank r (SamplesRead _ _ _ | Collated) => failure (rank_of s r) = None
  | LRank _ (ConsumerStopped | LocalFailed _) => False
  | LRank _ Urged => exists q, q < W /\ stopped (rank_of s q) = true
  | LDrawn r _ _ => at_phase (rank_of s r) = COUNT
  | _ => True
  end.

(** The step that rank [r]'s trainer is in never ends: a consumer left in the middle of it, before any rank had gone on. *)
Definition broken (s : sys) (r : nat) : Prop :=
  (forall p, p < W -> length (taken (rank_of s p)) <= length (taken (rank_of s r))) /\
  exists q, q < W /\ stopped (rank_of s q) = true /\ running s q = true /\ length (taken (rank_of s q)) = length (taken (rank_of s r)).

(** What happens by itself if a step never ends once a consumer has left in the middle of it. *)
Definition calm (s : sys) (l : label) : Prop := unaided s l /\ match l with LTrained r => ~ broken s r | _ => True end.

Definition can (P : label -> Prop) (s : sys) : Prop := exists l t, P l /\ step s l t.

Lemma can_rank : forall s r e t, r < W -> may cfg input s r e -> transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
  unaided s (LRank r e) -> can (calm s) s.
Proof. intros s r e t H M E U. eexists. eexists. split; [split; [exact U|exact Logic.I]|]. eapply StepRank; eauto. Qed.

Lemma calm_unaided : forall s, can (calm s) s -> can (unaided s) s.
Proof. intros s [l [t [[U _] St]]]. exists l, t. auto. Qed.

Lemma unaided_by_itself : forall s l, unaided s l -> by_itself s l.
Proof. intros s l [U V]. destruct l as [i e| |i|i n la]; try exact Logic.I; try exact V. destruct e; try exact V; destruct U. Qed.

(** ** No message contradicts the protocol *)

(** Every result is accepted: the Python raises neither UsageError nor PeerError. *)
Theorem every_result_is_accepted : forall s r x, sound s -> r < W -> pending s r = false -> nth_error (results s) (got s r) = Some x ->
  exists t, transition (cfg r) r (depth r) (rank_of s r) (Got x) = Some t.
Proof.
  intros s r x R H M1 M2. pose proof (so_invariant _ _ _ _ _ R) as I.
  destruct (sync_answer s r x (g_sync _ _ _ _ _ I r H) M1 M2) as [Wa [G [ms [El Em]]]].
  pose proof (log_entry W cfg depth input s _ _ I El) as [EL [ER EM]]. pose proof (g_core _ _ _ _ _ I r H) as K.
  pose proof (d_reasons _ _ _ R) as FR. rewrite Forall_forall in FR. specialize (FR _ (nth_error_In _ _ El)). simpl in *.
  pose proof (waiting_says _ _ _ _ _ _ K Wa) as Sa. apply nth_error_In in Em. destruct x as [a|cs|rs].
  - destruct (reduce_is _ _ ER) as [os [-> [A _]]]. apply in_map_iff in Em as [o [Eo Io]]. rewrite <- Eo in Sa. destruct Sa as [Ph [_ O]]. rewrite Ph.
    unfold agree. destruct (is_bad a) eqn:B; [eauto|].
    assert (Rr : o_round_min a = round (rank_of s r)).
    { destruct (of_round _ _ _ _ O) as [R1 R2]. destruct (ag_round _ _ A o Io) as [R3 R4].
      destruct (not_bad a B) as [_ [Eq _]]. lia. }
    rewrite Rr, Nat.eqb_refl. simpl. destruct (o_stop_rank a) eqn:Sr; [eauto|].
    destruct (o_ready a) eqn:Ra; simpl; [destruct (target (cfg r) a); [eauto|]; destruct (align_at _ _ _ _ _ _); eauto|].
    exfalso. assert (Rt : o_ready a = true); [|congruence]. apply (all_were_ready a os A B Sr). intros o1 Ho Ro. apply In_nth_error in Ho as [i Hi].
    destruct (EM i _ (map_nth_error MOffer _ _ Hi)) as [_ [_ [_ [Fl _]]]]. exact (Fl Ro).
  - destruct (reduce_is _ _ ER) as [l [-> [F _]]]. apply in_map_iff in Em as [c [Ec Ic]]. rewrite <- Ec in Sa. destruct Sa as [Ph ->]. rewrite Ph.
    rewrite Forall_forall in F. specialize (F _ Ic). rewrite map_length in F. unfold count. rewrite F, Nat.eqb_refl. simpl. eauto.
  - pose proof (reduce_is _ _ ER) as Ems. simpl in Ems. rewrite Ems in Em. apply in_map_iff in Em as [y [Ey _]].
    rewrite <- Ey in Sa. destruct Sa as [Ph _]. rewrite Ph. destruct (failure_of rs); [eauto|easy].
Qed.

(** A rank whose result is there receives it. If it shares an order, it draws first (in this proof, all that is left). *)
Lemma answer_possible : forall s r x, sound s -> r < W -> pending s r = false -> nth_error (results s) (got s r) = Some x -> can (calm s) s.
Proof.
  intros s r x R H P E. set (u := rank_of s r).
  assert (C : ended u = true \/ 1 <= length (window u) + wanted u \/ ended u = false /\ wanted u = 0) by (destruct (ended u), (wanted u); auto; right; left; lia).
  assert (D : has_more (cfg r) u \/ c_shares (cfg r) = true /\ at_phase u = COUNT).
  { destruct (k_window _ _ _ _ _ _ (g_core _ _ _ _ _ R r H)) as [M|[M Sh]]; auto. }
  assert (Take : (c_shares (cfg r) = true -> has_more (cfg r) u) -> can (calm s) s).
  { intros Mo. assert (M : may cfg input s r (Got x)) by (split; auto). destruct (every_result_is_accepted s r x R H P E) as [t T].
    eapply can_rank; [exact H|exact M|exact T|split; exact Logic.I]. }
  destruct D as [D|[Sh Ph]]; [exact (Take (fun _ => D))|]. destruct C as [C|[C|[En Wa]]]; [apply Take; intros _; left; exact C|apply Take; intros _; right; left; exact C|].
  exists (LDrawn r (length (input r) - read u) true). eexists. split; [split; [split; [exact Logic.I|exact Ph]|exact Logic.I]|].
  pose proof (k_read _ _ _ _ _ _ (g_core _ _ _ _ _ R r H)) as Rd. fold u in Rd.
  apply StepDrawn; [exact H|]. unfold may_draw. fold u. repeat split; auto; try lia. left. repeat split; auto.
  unfold results in E. rewrite <- (map_length snd). apply nth_error_Some. congruence.
Qed.

(** The messages of one exchange are always of one kind and one size. *)
Theorem every_exchange_that_all_have_joined_completes : forall s, invariant s -> (forall r, r < W -> pending s r = true) -> exists x, reduce (messages W s) = Some x.
Proof.
  intros s I P. pose proof (some_rank _ _ ok) as SR.
  assert (C : forall r, r < W -> core (cfg r) (cfg 0) r (input r) (whole s) (rank_of s r) /\ is_waiting (rank_of s r) = true).
  { intros r H. destruct (pending_current W cfg depth input s r I H (P r H)) as [<- [_ Wa]]. split; [apply (g_core _ _ _ _ _ I r H)|exact Wa]. }
  assert (NE : messages W s <> []) by (intros E; pose proof (messages_length W s) as L; rewrite E in L; simpl in L; lia).
  assert (Say : forall m, In m (messages W s) -> match h_kind (whole s), m with
    | NOffer, MOffer _ | NReport, MReport _ => True | NCount n, MCounts cs => length cs = n | _, _ => False end).
  { intros m Hm. apply in_map_iff in Hm as [r [<- H]]. apply in_seq in H as [_ H]. simpl in H.
    destruct (C r H) as [K Wa]. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk.
    pose proof (waiting_says _ _ _ _ _ _ K Wa) as Sa. destruct (message (rank_of s r)) as [o|cs|x]; destruct Sa as [Ph Sa]; rewrite Ph in Kk; [|destruct Kk as [Kk _]|]; rewrite Kk; auto.
    rewrite Sa. apply map_length. }
  destruct (h_kind (whole s)) as [|n| |o l] eqn:Hk.
  - destruct (map_choice _ _ MOffer (fun _ => True) (messages W s)) as [os [E _]]; [intros m Hm; specialize (Say m Hm); destruct m; try easy; eauto|].
    rewrite E in *. destruct os as [|o os]; [easy|]. simpl. unfold offers_of. rewrite (all_say_total _ _ MOffer (fun _ => True)); auto; [eauto|]. apply Forall_forall. auto.
  - destruct (map_choice _ _ MCounts (fun c => length c = n) (messages W s)) as [l [E F]]; [intros m Hm; specialize (Say m Hm); destruct m; try easy; eauto|].
    rewrite E in *. destruct l as [|c l]; [easy|]. inversion F; subst. simpl. unfold counts_of. rewrite (all_say_total _ _ MCounts (fun k => length k = length c)); [eauto| |assumption]. intros k ->. rewrite Nat.eqb_refl. reflexivity.
  - destruct (map_choice _ _ MReport (fun _ => True) (messages W s)) as [rs [E _]]; [intros m Hm; specialize (Say m Hm); destruct m; try easy; eauto|].
    rewrite E in *. destruct rs as [|o rs]; [easy|]. cbn [reduce map]. change (MReport o :: map MReport rs) with (map MReport (o :: rs)). unfold reports_of.
    rewrite (all_say_total _ _ MReport (fun _ => True)); auto; [eauto|]. apply Forall_forall. auto.
  - exfalso. destruct (C 0 ltac:(lia)) as [K Wa]. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K)) as Ph. rewrite Hk in Ph.
    unfold is_waiting in Wa. destruct Ph as [Ph|Ph]; rewrite Ph in Wa; discriminate.
Qed.

(** ** The trainers *)

(** The consumer can take a step. *)
Definition takeable (s : state) : Prop := queue s <> [] /\ forall l, limit s = Some l -> length (taken s) < l.

Lemma head_number : forall s r x q, invariant s -> r < W -> queue (rank_of s r) = x :: q -> s_number x = length (taken (rank_of s r)).
Proof.
  intros s r x q I H E. eapply step_number; [apply (g_core _ _ _ _ _ I r H)|apply history_numbered|]. unfold steps_of. rewrite E, nth_error_app2, Nat.sub_diag by lia. reflexivity.
Qed.

Lemma takes_its_step : forall s r, invariant s -> r < W -> takeable (rank_of s r) ->
  exists t, transition (cfg r) r (depth r) (rank_of s r) StepTaken = Some t.
Proof.
  intros s r I H [NE L]. destruct (queue (rank_of s r)) as [|x q] eqn:Q; [easy|]. pose proof (head_number s r x q I H Q) as Nx. simpl. rewrite Q.
  replace (below _ _) with true; [eauto|]. symmetry. unfold below. destruct (limit _) as [l|]; [|reflexivity].
  apply Nat.ltb_lt. rewrite Nx. exact (L l eq_refl).
Qed.

Lemma take_possible : forall s r, invariant s -> r < W -> running s r = false -> takeable (rank_of s r) -> can (calm s) s.
Proof. intros s r I H Ru T. destruct (takes_its_step s r I H T) as [t E]. exact (can_rank s r StepTaken t H Ru E (conj Logic.I Logic.I)). Qed.

Definition takeableb (s : state) : bool := negb (is_nil (queue s)) && below (limit s) (length (taken s)).

Lemma takeableb_spec : forall s, takeableb s = true <-> takeable s.
Proof.
  intros s. unfold takeableb, takeable, below. rewrite andb_true_iff. destruct (queue s) as [|y ys]; simpl; destruct (limit s) as [m|]; rewrite ?Nat.ltb_lt; split; intros [A B]; split; auto; try discriminate; try easy.
  intros m' E. injection E as <-. exact B.
Qed.

(** A trainer that waits in a step waits for one that can go on, or for one whose consumer has left. *)
Lemma trainer_goes_on : forall s r, sound s -> r < W -> running s r = true ->
  (forall i n l, h_kind (whole s) = NClosed (Stopped i n) l -> length (taken (rank_of s r)) <= l) ->
  can (calm s) s \/ (exists q, q < W /\ stopped (rank_of s q) = true /\ length (taken (rank_of s q)) < length (taken (rank_of s r))) \/ (broken s r /\ can (unaided s) s).
Proof.
  intros s r R H Ru Lr. pose proof (so_invariant _ _ _ _ _ R) as I.
  destruct (min_exists (fun i => length (taken (rank_of s i))) W (some_rank _ _ ok)) as [q [Hq M]].
  destruct (le_lt_dec (length (taken (rank_of s r))) (length (taken (rank_of s q)))) as [L|L].
  { assert (Tr : forall i, i < W -> length (taken (rank_of s r)) <= length (taken (rank_of s i))) by (intros i Hi; specialize (M i Hi); simpl in M; lia).
    assert (D : decidable (broken s r)) by (unfold broken; decides). destruct D as [B|B].
    - right. right. split; [exact B|]. eexists. eexists. split; [|apply (StepTrained W cfg depth input s r H Ru Tr)]. split; exact Logic.I.
    - left. eexists. eexists. split; [|apply (StepTrained W cfg depth input s r H Ru Tr)]. split; [split; exact Logic.I|exact B]. }
  destruct (running s q) eqn:Rq.
  { left. eexists. eexists. split; [|apply (StepTrained W cfg depth input s q Hq Rq); exact M]. split; [split; exact Logic.I|]. intros [B _]. specialize (B r H). lia. }
  destruct (takeableb (rank_of s q)) eqn:T; [left; apply (take_possible s q I Hq Rq); apply takeableb_spec, T|].
  destruct (stopped (rank_of s q)) eqn:Sq; [right; left; exists q; auto|left].
  pose proof (g_core _ _ _ _ _ I r H) as Kr. pose proof (g_core _ _ _ _ _ I q Hq) as Kq.
  assert (Rel : length (taken (rank_of s q)) < h_released (hist_of s r)).
  { rewrite <- (k_released _ _ _ _ _ _ Kr). unfold released_of. rewrite !app_length. lia. }
  destruct (le_lt_dec (got s r) (got s q)) as [G|G].
  - (* q has released the step too, so its limit forbids the step *)
    destruct (hist_order cfg h0 s r q G) as [_ [_ Rq2]]. 
    assert (Lim : exists m, limit (rank_of s q) = Some m /\ m <= length (taken (rank_of s q))).
    { destruct (queue (rank_of s q)) as [|x ys] eqn:Q.
      - assert (Ob : released (rank_of s q) <> []).
        { intros E. pose proof (k_released _ _ _ _ _ _ Kq) as Z. unfold released_of in Z. rewrite Q, E, !app_nil_r in Z. lia. }
        destruct (t_released _ _ (g_tight _ _ _ _ _ I q Hq) Ob) as [D|[l [D1 D2]]]; rewrite Q in *; simpl in *; [specialize (deep q Hq); lia|]. exists l. split; [exact D1|lia].
      - unfold takeableb, below in T. rewrite Q in T. simpl in T. destruct (limit (rank_of s q)) as [l|]; [|discriminate]. apply Nat.ltb_ge in T. eauto. }
    destruct Lim as [l [L1 L2]]. rewrite (k_free _ _ _ _ _ _ Kq Sq) in L1. destruct (h_kind (hist_of s q)) as [| | |o l'] eqn:Hk; try discriminate. injection L1 as ->.
    exfalso. destruct (history_limit _ _ _ _ Hk) as [[i [n ->]]|E].
    + destruct (hist_cases W cfg depth input s q I Hq) as [[Gq Wq]|[_ [_ [Wa _]]]].
      2:{ pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ Kq)) as Ph. rewrite Hk in Ph. unfold is_waiting in Wa. destruct Ph as [Ph|Ph]; rewrite Ph in Wa; discriminate. }
      rewrite Wq in Hk. specialize (Lr i n l Hk). lia.
    + change (l = h_released (hist_of s q)) in E. lia.
  - destruct (hist_cases W cfg depth input s q I Hq) as [[Gq _]|[Pq [Gq [_ [ms [x [El _]]]]]]].
    + destruct (hist_cases W cfg depth input s r I H) as [[Gr _]|[_ [Gr _]]]; lia.
    + exact (answer_possible s q x R Hq Pq (results_nth _ _ _ El)).
Qed.

(** ** FREE *)

Definition finished (s : sys) (r : nat) : Prop :=
  at_phase (rank_of s r) = DONE /\ running s r = false /\ ~ takeable (rank_of s r).

(** A trainer inside a step that a consumer which has left will never enter. *)
Definition forsaken (s : sys) (r : nat) : Prop :=
  running s r = true /\ exists q, q < W /\ stopped (rank_of s q) = true /\ length (taken (rank_of s q)) < length (taken (rank_of s r)).

(** R2.3: the longest run of samples for which the window has room. An empty window always has room for one. *)
Fixpoint with_room (no_room : list sample -> sample -> bool) (w l : list sample) : list sample :=
  match l with
  | [] => []
  | x :: later => if negb (is_nil w) && no_room w x then [] else x :: with_room no_room (w ++ [x]) later
  end.

Lemma room_for_all : forall l w, with_room (fun _ _ => false) w l = l.
Proof. induction l as [|x l IH]; intros w; simpl; [reflexivity|]. rewrite andb_false_r, IH. reflexivity. Qed.

Lemma with_room_first : forall no_room l w, exists rest, l = with_room no_room w l ++ rest /\ (rest <> [] -> w ++ with_room no_room w l <> []).
Proof.
  intros no_room. induction l as [|x l IH]; intros w; [exists []; split; [reflexivity|easy]|]. simpl. destruct (negb (is_nil w) && no_room w x) eqn:E.
  - exists (x :: l). split; [reflexivity|]. intros _. destruct w; [discriminate|easy].
  - destruct (IH (w ++ [x])) as [rest [E1 E2]]. exists rest. split; [simpl; congruence|]. intros _. destruct w; discriminate.
Qed.

(** FREE: whatever room there is, an open read can be answered with the longest run that fits. If the run is shorter than what was asked
    for, the window is reported full, which windows bounded in bytes may be. *)
Theorem a_read_can_be_answered_with_what_there_is_room_for : forall s r no_room, sound s -> r < W -> wanted (rank_of s r) <> 0 ->
  let next := firstn (wanted (rank_of s r)) (skipn (read (rank_of s r)) (input r)) in
  let xs := with_room no_room (window (rank_of s r)) next in
  let full := length xs <? length next in
  let answer := SamplesRead xs (negb full && (length next <? wanted (rank_of s r))) full in
  (full = true -> c_bounded (cfg r) r = true /\ at_phase (rank_of s r) <> DONE) ->
  may cfg input s r answer /\ exists t, transition (cfg r) r (depth r) (rank_of s r) answer = Some t.
Proof.
  intros s r no_room R H Wa next xs full answer B. set (u := rank_of s r) in *. unfold answer.
  pose proof (k_read _ _ _ _ _ _ (g_core _ _ _ _ _ R r H)) as Rd. fold u in Rd.
  destruct (with_room_first no_room next (window u)) as [rest [E1 E2]]. fold xs in E1, E2.
  assert (Ln : length next = Nat.min (wanted u) (length (input r) - read u)) by (unfold next; rewrite firstn_length, skipn_length; reflexivity).
  assert (Lx : length next = length xs + length rest) by (rewrite E1 at 1; apply app_length).
  assert (Px : xs = firstn (length xs) (skipn (read u) (input r))).
  { assert (Px : xs = firstn (length xs) next) by (rewrite E1, firstn_app, Nat.sub_diag, firstn_all, app_nil_r; reflexivity).
    rewrite Px at 1. unfold next. rewrite firstn_firstn. f_equal. lia. }
  assert (Fu : full = true -> rest <> []).
  { intros F. unfold full in F. apply Nat.ltb_lt in F. destruct rest; [simpl in Lx; lia|discriminate]. }
  assert (Nf : full = false -> xs = next).
  { intros F. unfold full in F. apply Nat.ltb_ge in F. destruct rest; [rewrite app_nil_r in E1; auto|simpl in Lx; lia]. }
  assert (Eu : full = true -> ended u = false).
  { intros F. destruct (B F) as [B' _]. destruct (ended u) eqn:En'; [|reflexivity]. destruct (k_ended _ _ _ _ _ _ (g_core _ _ _ _ _ R r H) En') as [_ Z].
    unfold c_bounded in B'. apply andb_true_iff in B' as [_ B']. apply negb_true_iff in B'. specialize (Z B'). contradiction. }
  split.
  - simpl. fold u. split; [exact Px|]. split; [|split].
    + intros E. apply andb_prop in E as [F E]. apply negb_true_iff in F. apply Nat.ltb_lt in E. rewrite (Nf F). lia.
    + destruct full eqn:F; [auto|]. specialize (Nf eq_refl). simpl. rewrite Nf. destruct next as [|x l]; [|left; discriminate].
      right; left. simpl. apply Nat.ltb_lt. lia.
    + exact B.
  - simpl. replace (wanted u =? 0) with false by (symmetry; apply Nat.eqb_neq; exact Wa). replace (wanted u <? length xs) with false by (symmetry; apply Nat.ltb_ge; lia).
    destruct full eqn:F; simpl.
    + rewrite andb_false_r. unfold may_be_full. rewrite (Eu eq_refl). simpl. specialize (E2 (Fu eq_refl)). unfold full in F. apply Nat.ltb_lt in F.
      replace (length xs <? wanted u) with true by (symmetry; apply Nat.ltb_lt; lia). destruct (window u ++ xs); [easy|]. simpl. eauto.
    + specialize (Nf eq_refl). rewrite Nf. destruct next as [|x l]; [|simpl; eauto]. simpl. replace (0 <? wanted u) with true by (symmetry; apply Nat.ltb_lt; lia). simpl. eauto.
Qed.

(** So a read can be answered with all samples that are left. *)
Lemma read_possible : forall s r, sound s -> r < W -> failure (rank_of s r) = None -> wanted (rank_of s r) <> 0 -> can (calm s) s.
Proof.
  intros s r R H Nf Wa. pose proof (a_read_can_be_answered_with_what_there_is_room_for s r (fun _ _ => false) R H Wa) as A. cbv zeta in A.
  rewrite room_for_all, Nat.ltb_irrefl in A. destruct A as [M [t T]]; [discriminate|].
  eapply (can_rank s r); [exact H|exact M|exact T|split; [exact Logic.I|exact Nf]].
Qed.

Definition phase_is (p : phase_name) (s : state) : bool :=
  match p, at_phase s with FILL, FILL | OFFER, OFFER | COUNT, COUNT | REPORT, REPORT | DRAIN, DRAIN | DONE, DONE => true | _, _ => false end.

(** In every sound state something can happen, or a rank waits for an urge, or every loader is done or waits for its trainer. *)
Lemma free_lemma : forall s, sound s ->
  can (calm s) s \/ (exists r, r < W /\ at_phase (rank_of s r) = FILL /\ is_ready (rank_of s r) = true /\ released (rank_of s r) <> [] /\ urged (rank_of s r) = false /\
     (running s r = true -> exists q, q < W /\ stopped (rank_of s q) = true) /\ (running s r = false -> False)) \/
  (forall r, r < W -> at_phase (rank_of s r) = DONE \/ (at_phase (rank_of s r) = DRAIN /\ (forsaken s r \/ (running s r = true /\ broken s r /\ can (unaided s) s)))).
Proof.
  intros s R. pose proof (so_invariant _ _ _ _ _ R) as I. pose proof (some_rank _ _ ok) as SR.
  destruct (dec_exists (fun r => negb (pending s r) && (got s r <? length (log s))) W) as [[r [H E]]|NG].
  { left. apply andb_true_iff in E as [E1 E2]. apply negb_true_iff in E1. apply Nat.ltb_lt in E2.
    destruct (nth_error (results s) (got s r)) as [x|] eqn:Ex; [|apply nth_error_None in Ex; unfold results in Ex; rewrite map_length in Ex; lia].
    exact (answer_possible s r x R H E1 Ex). }
  assert (Cur : forall r, r < W -> hist_of s r = whole s /\ (pending s r = true \/ is_waiting (rank_of s r) = false)).
  { intros r H. specialize (NG r H). destruct (g_sync _ _ _ _ _ I r H) as [[P [G Wa]]|[[P [G _]]|[P [G Wa]]]].
    - split; [apply whole_when_current, G|auto].
    - exfalso. rewrite P in NG. simpl in NG. apply Nat.ltb_ge in NG. lia.
    - split; [apply whole_when_current, G|auto]. }
  destruct (dec_exists (fun r => negb (pending s r)) W) as [[r [H E]]|AP].
  2:{ left. destruct (every_exchange_that_all_have_joined_completes s I) as [x X]; [intros r H; specialize (AP r H); apply negb_false_iff in AP; exact AP|].
      eexists. eexists. split; [|apply (StepExchange W cfg depth input s x); [|exact X]]; [split; [split|]; exact Logic.I|]. intros r H. specialize (AP r H). apply negb_false_iff in AP. exact AP. }
  destruct (dec_exists (fun r => phase_is FILL (rank_of s r)) W) as [[f [Hf Ef]]|NF].
  - unfold phase_is in Ef. destruct (at_phase (rank_of s f)) eqn:Pf; try discriminate. clear Ef.
    destruct (t_fill _ _ (g_tight _ _ _ _ _ I f Hf) Pf) as [Me Fi].
    destruct (is_ready (rank_of s f)) eqn:Rd.
    2:{ left. unfold is_ready in Rd. assert (Nf : failure (rank_of s f) = None) by (unfold must_end in Me; destruct (failure (rank_of s f)); [discriminate|reflexivity]).
        destruct (wanted (rank_of s f)) eqn:Wa; [|apply (read_possible s f R Hf Nf); rewrite Wa; discriminate].
        simpl in Rd. rewrite andb_true_r in Rd. eapply (can_rank s f Collated); [exact Hf|exact Logic.I|simpl; rewrite Rd; reflexivity|split; [exact Logic.I|exact Nf]]. }
    destruct Fi as [Fi|[Ob Ur]]; [congruence|].
    pose proof (g_core _ _ _ _ _ I f Hf) as Kf. pose proof (k_kind _ _ _ _ _ _ Kf) as Kk. unfold kind_ok in Kk. rewrite Pf in Kk.
    assert (Ns : stopped (rank_of s f) = false) by (unfold must_end in Me; apply orb_false_iff in Me; apply Me).
    assert (Lim : limit (rank_of s f) = None) by (rewrite (k_free _ _ _ _ _ _ Kf Ns), Kk; reflexivity).
    assert (Q : queue (rank_of s f) <> []).
    { destruct (t_released _ _ (g_tight _ _ _ _ _ I f Hf) Ob) as [D|[l [D _]]]; [|congruence]. intros Q. rewrite Q in D. simpl in D. specialize (deep f Hf). lia. }
    assert (Tk : takeable (rank_of s f)) by (split; [exact Q|intros l L; congruence]).
    destruct (running s f) eqn:Ru; [|left; apply (take_possible s f I Hf Ru Tk)].
    destruct (trainer_goes_on s f R Hf Ru) as [C|[[q [Hq [Sq _]]]|[[_ [q [Hq [Sq _]]]] _]]];
      [intros i n l Hk; destruct (Cur f Hf) as [Wf _]; rewrite <- Wf in Hk; congruence|left; exact C| |];
      (right; left; exists f; repeat (split; [assumption|]); split; [intros _; exists q; auto|intros Z; congruence]).
  - assert (Hk : exists o l, h_kind (whole s) = NClosed o l).
    { destruct (Cur r H) as [Wr [Pr|Wt]]; [rewrite Pr in E; discriminate|]. rewrite <- Wr.
      pose proof (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I r H)) as K. unfold kind_ok in K. specialize (NF r H). unfold phase_is in NF. unfold is_waiting in Wt.
      destruct (at_phase (rank_of s r)); try discriminate; destruct K as [o [l [K _]]]; eauto. }
    destruct Hk as [o [l Hk]].
    assert (Ph : forall q, q < W -> at_phase (rank_of s q) = DRAIN \/ at_phase (rank_of s q) = DONE).
    { intros q Hq. destruct (Cur q Hq) as [Wq _]. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ (g_core _ _ _ _ _ I q Hq))) as P. rewrite Wq, Hk in P. exact P. }
    destruct (dec_exists (fun q => phase_is DRAIN (rank_of s q) && negb (running s q)) W) as [[d [Hd Ed]]|ND].
    + left. apply andb_true_iff in Ed as [Ed Rd]. apply negb_true_iff in Rd. unfold phase_is in Ed. destruct (at_phase (rank_of s d)) eqn:Pd; try discriminate.
      apply (take_possible s d I Hd Rd). destruct (t_drain _ _ (g_tight _ _ _ _ _ I d Hd) Pd) as [Ob Li]. split.
      * destruct (t_released _ _ (g_tight _ _ _ _ _ I d Hd) Ob) as [D|[l' [D1 D2]]]; [|specialize (Li l' D1); lia]. intros Q. rewrite Q in D. simpl in D. specialize (deep d Hd). lia.
      * intros l' L. specialize (Li l' L). lia.
    + assert (Each : forall q, q < W -> can (calm s) s \/ at_phase (rank_of s q) = DONE \/
        (at_phase (rank_of s q) = DRAIN /\ (forsaken s q \/ (running s q = true /\ broken s q /\ can (unaided s) s)))).
      { intros q Hq. destruct (Ph q Hq) as [P|P]; [|auto]. specialize (ND q Hq). unfold phase_is in ND. rewrite P in ND. simpl in ND. apply negb_false_iff in ND.
        destruct (trainer_goes_on s q R Hq ND) as [C|[F|[B C]]]; [|left; exact C| |].
        - intros i n l' Hk'. destruct (t_drain _ _ (g_tight _ _ _ _ _ I q Hq) P) as [_ Li]. pose proof (g_core _ _ _ _ _ I q Hq) as Kq.
          destruct (stopped (rank_of s q)) eqn:Sq.
          + destruct (k_stop _ _ _ _ _ _ Kq Sq) as [m [L1 L2]]. specialize (Li m L1). lia.
          + pose proof (k_free _ _ _ _ _ _ Kq Sq) as L1. destruct (Cur q Hq) as [Wq _]. rewrite Wq, Hk' in L1. specialize (Li l' L1). lia.
        - right. right. split; [exact P|]. left. split; [exact ND|exact F].
        - right. right. split; [exact P|]. right. auto. }
      destruct (one_or_each _ _ W Each) as [C|A]; auto.
Qed.

(** FREE: as long as no consumer leaves, the coupled system of loaders, queues and trainers can go on by itself, or every loader is done
    and every trainer has taken all its steps. This holds even after failures, and without urging. *)
Theorem the_coupled_system_never_deadlocks : forall s, sound s -> (forall r, r < W -> stopped (rank_of s r) = false) ->
  can (unaided s) s \/ forall r, r < W -> finished s r.
Proof.
  intros s R NS. pose proof (so_invariant _ _ _ _ _ R) as I. destruct (free_lemma s R) as [C|[[r [H [_ [_ [_ [_ [X Y]]]]]]]|A]]; [left; apply calm_unaided, C| |].
  - exfalso. destruct (running s r); [destruct (X eq_refl) as [q [Hq Sq]]; rewrite NS in Sq by exact Hq; discriminate|auto].
  - assert (D : forall r, r < W -> at_phase (rank_of s r) = DONE).
    { intros r H. destruct (A r H) as [D|[_ [[_ [q [Hq [Sq _]]]]|[_ [[_ [q [Hq [Sq _]]]] _]]]]]; [exact D| |]; rewrite NS in Sq by exact Hq; discriminate. }
    destruct (dec_exists (fun r => running s r) W) as [[r [H Ru]]|NR].
    + destruct (trainer_goes_on s r R H Ru) as [C|[[q [Hq [Sq _]]]|[_ C]]]; [|left; apply calm_unaided, C|rewrite NS in Sq by exact Hq; discriminate|auto].
      intros i n l Hk. exfalso. destruct (d_outcome _ _ _ R _ _ Hk) as [Hi Si]. rewrite NS in Si by exact Hi. discriminate.
    + destruct (dec_exists (fun r => takeableb (rank_of s r)) W) as [[r [H T]]|NT].
      * left. apply calm_unaided, (take_possible s r I H (NR r H)). apply takeableb_spec, T.
      * right. intros r H. split; [apply D, H|]. split; [apply NR, H|]. intros T. apply takeableb_spec in T. rewrite NT in T by exact H. discriminate.
Qed.

(** STOP: after consumers have left, ranks that are urged still end. A loader that cannot end waits for a trainer inside a step that a
    consumer which has left never entered. *)
Lemma urged_or_over : forall s, sound s ->
  (exists l t, by_itself s l /\ match l with LTrained r => ~ broken s r | _ => True end /\ step s l t) \/
  forall r, r < W -> at_phase (rank_of s r) = DONE \/ (at_phase (rank_of s r) = DRAIN /\ (forsaken s r \/ (running s r = true /\ broken s r /\ can (unaided s) s))).
Proof.
  intros s R. destruct (free_lemma s R) as [[l [t [[U B] St]]]|[[r [H [Ph [Rd [Ob [Ur [X Y]]]]]]]|A]]; [| |auto].
  { left. exists l, t. split; [apply unaided_by_itself, U|split; [exact B|exact St]]. }
  destruct (running s r) eqn:Ru; [|exfalso; auto]. destruct (X eq_refl) as [q [Hq Sq]]. left.
  exists (LRank r Urged). eexists. split; [exists q; auto|]. split; [exact Logic.I|]. eapply StepRank; [exact H| |].
  - simpl. unfold is_ending. rewrite Ph. auto.
  - simpl. unfold is_ending. rewrite Ph. reflexivity.
Qed.

Theorem after_a_stop_every_loader_ends_or_its_trainer_waits_for_the_one_that_left : forall s, sound s ->
  can (by_itself s) s \/ forall r, r < W -> at_phase (rank_of s r) = DONE \/ (at_phase (rank_of s r) = DRAIN /\ forsaken s r).
Proof.
  intros s R. destruct (urged_or_over s R) as [[l [t [B [_ St]]]]|A]; [left; exists l, t; auto|].
  apply one_or_each. intros r H. destruct (A r H) as [D|[D [F|[_ [_ [l [t [U St]]]]]]]]; auto.
  left. exists l, t. split; [apply unaided_by_itself, U|exact St].
Qed.

(** ** STOP, under lockstep (A5): a trainer leaves a step only when every rank's consumer has taken it *)

Notation leads := (System.leads W cfg depth input).

Theorem no_consumer_is_more_than_one_step_ahead_of_another : forall s r q, sound s -> r < W -> q < W ->
  length (taken (rank_of s r)) <= length (taken (rank_of s q)) + 1.
Proof. intros s r q R Hr Hq. pose proof (d_lockstep _ _ _ R r q Hr Hq). destruct (running s r); lia. Qed.

Theorem a_consumer_that_stopped_takes_no_further_step : forall s t q, sound s -> leads s t -> q < W -> stopped (rank_of s q) = true ->
  stopped (rank_of t q) = true /\ taken (rank_of t q) = taken (rank_of s q).
Proof.
  intros s t q R Ld H St. induction Ld as [s|s t l u Ld IH S]; [auto|]. destruct (IH R St) as [S1 S2]. pose proof (leads_sound W cfg depth input ok s t Ld R) as R'.
  destruct S as [t i e v Hi M E|t x P Rd|t i Hi Ru Tk|t i n la Hi Dr]; simpl; auto. destruct (Nat.eq_dec q i) as [->|NE]; [|rewrite update_other by exact NE; auto].
  rewrite update_same. split; [eapply stopped_stays; eauto|]. rewrite <- S2. pose proof (taken_changes _ _ _ _ _ _ E) as Tc. destruct e; try exact Tc.
  exfalso. pose proof (so_invariant _ _ _ _ _ R') as I. destruct (k_stop _ _ _ _ _ _ (g_core _ _ _ _ _ I i Hi) S1) as [m [L1 L2]].
  simpl in E. destruct (queue (rank_of t i)) as [|x ys] eqn:Q; [discriminate|]. rewrite L1, (head_number t i x ys I Hi Q) in E. simpl in E.
  replace (length (taken (rank_of t i)) <? m) with false in E by (symmetry; apply Nat.ltb_ge; lia). discriminate.
Qed.

Theorem no_consumer_takes_more_than_one_step_beyond_one_that_stopped : forall s t r q, sound s -> leads s t -> r < W -> q < W ->
  stopped (rank_of s q) = true -> length (taken (rank_of t r)) <= length (taken (rank_of s q)) + 1.
Proof.
  intros s t r q R Ld Hr Hq St. destruct (a_consumer_that_stopped_takes_no_further_step s t q R Ld Hq St) as [_ <-].
  apply no_consumer_is_more_than_one_step_ahead_of_another; [|assumption|assumption]. exact (leads_sound W cfg depth input ok s t Ld R).
Qed.

(** STOP: if all consumers stop after the same number of steps, then every loader is done when nothing more can happen by itself. *)
Theorem consumers_that_stop_together_end_together : forall s, sound s ->
  (forall r, r < W -> stopped (rank_of s r) = true) ->
  (forall r q, r < W -> q < W -> length (taken (rank_of s r)) = length (taken (rank_of s q))) ->
  can (by_itself s) s \/ forall r, r < W -> at_phase (rank_of s r) = DONE.
Proof.
  intros s R _ Eq. destruct (after_a_stop_every_loader_ends_or_its_trainer_waits_for_the_one_that_left s R) as [C|A]; [auto|right].
  intros r H. destruct (A r H) as [D|[_ [_ [q [Hq [_ L]]]]]]; [exact D|]. rewrite (Eq r q H Hq) in L. lia.
Qed.

End Coupled.
