(** Lists of any type: permutations, sorting, and cutting a list into runs. *)
Require Import List Arith Lia Bool Permutation Sorted.
Import ListNotations.

Lemma concat_perm : forall (A : Type) (g h : list (list A)), Permutation g h -> Permutation (concat g) (concat h).
Proof. intros A g h P. rewrite <- (map_id g), <- (map_id h), <- !flat_map_concat_map. apply Permutation_flat_map, P. Qed.

Lemma concat_repeat_nil : forall (A : Type) n, concat (repeat ([] : list A) n) = [].
Proof. induction n; simpl; auto. Qed.

Lemma Forall_perm : forall A (P : A -> Prop) l m, Permutation l m -> Forall P l -> Forall P m.
Proof. intros A P l m H F. rewrite Forall_forall in *. intros x Hx. apply F. eapply Permutation_in; [symmetry; exact H|exact Hx]. Qed.

Lemma singles_are : forall A (l : list A), concat (map (fun x => [x]) l) = l.
Proof. induction l; simpl; congruence. Qed.

Lemma Forall_repeat : forall A (P : A -> Prop) x n, P x -> Forall P (repeat x n).
Proof. induction n; simpl; auto. Qed.

Lemma Forall_firstn : forall A (P : A -> Prop) n l, Forall P l -> Forall P (firstn n l).
Proof. intros A P n l F. rewrite <- (firstn_skipn n l), Forall_app in F. apply F. Qed.

Lemma Forall_skipn : forall A (P : A -> Prop) n l, Forall P l -> Forall P (skipn n l).
Proof. intros A P n l F. rewrite <- (firstn_skipn n l), Forall_app in F. apply F. Qed.

Lemma concat_perms : forall (A B : Type) (f g : A -> list B) l, (forall x, In x l -> Permutation (f x) (g x)) -> Permutation (concat (map f l)) (concat (map g l)).
Proof.
  intros A B f g. induction l as [|x l IH]; simpl; intros H; [constructor|]. apply Permutation_app; [apply H; auto|apply IH; auto].
Qed.

Lemma concat_map_app : forall (A B : Type) (f g : A -> list B) l,
  Permutation (concat (map (fun x => f x ++ g x) l)) (concat (map f l) ++ concat (map g l)).
Proof.
  intros A B f g. induction l as [|x l IH]; simpl; [constructor|]. rewrite IH, <- !app_assoc. apply Permutation_app_head, Permutation_app_swap_app.
Qed.

(** ** Sums *)

Fixpoint sum_over {A : Type} (f : A -> nat) (l : list A) : nat := match l with [] => 0 | x :: r => f x + sum_over f r end.
Notation sum := (sum_over (fun n => n)).

Lemma sum_over_app : forall (A : Type) (f : A -> nat) l m, sum_over f (l ++ m) = sum_over f l + sum_over f m.
Proof. induction l as [|x l IH]; simpl; intros m; [reflexivity|]. rewrite IH. lia. Qed.

Lemma sum_over_perm : forall {A : Type} (f : A -> nat) {l m}, Permutation l m -> sum_over f l = sum_over f m.
Proof. induction 1; simpl; lia. Qed.

Lemma sum_over_map : forall (A B : Type) (f : B -> nat) (g : A -> B) l, sum_over f (map g l) = sum_over (fun x => f (g x)) l.
Proof. induction l; simpl; congruence. Qed.

Lemma sum_over_ext : forall (A : Type) (f g : A -> nat) l, (forall x, f x = g x) -> sum_over f l = sum_over g l.
Proof. intros A f g l E. induction l; simpl; congruence. Qed.

Lemma sum_over_add : forall (A : Type) (f g : A -> nat) l, sum_over (fun x => f x + g x) l = sum_over f l + sum_over g l.
Proof. induction l as [|x l IH]; simpl; lia. Qed.

Lemma sum_over_const : forall (A : Type) c (l : list A), sum_over (fun _ => c) l = length l * c.
Proof. induction l; simpl; congruence. Qed.

Lemma sum_over_le : forall (A : Type) (f g : A -> nat) l, (forall x, In x l -> f x <= g x) -> sum_over f l <= sum_over g l.
Proof. induction l as [|x l IH]; simpl; intros H; [lia|]. pose proof (H x). specialize (IH ltac:(auto)). intuition lia. Qed.

Lemma sum_over_lt : forall (A : Type) (f g : A -> nat) l y, In y l -> f y < g y -> (forall x, In x l -> f x <= g x) -> sum_over f l < sum_over g l.
Proof.
  intros A f g l y I L H. apply in_split in I as [a [b ->]]. rewrite !sum_over_app. simpl.
  pose proof (sum_over_le A f g a ltac:(intros; apply H, in_or_app; auto)). pose proof (sum_over_le A f g b ltac:(intros; apply H, in_or_app; simpl; auto)). lia.
Qed.

Lemma sum_over_swap : forall (A B : Type) (a : A -> B -> nat) l m, sum_over (fun j => sum_over (fun q => a q j) l) m = sum_over (fun q => sum_over (a q) m) l.
Proof.
  intros A B a l m. induction m as [|j m IH]; simpl; [rewrite sum_over_const; lia|]. rewrite IH, <- sum_over_add. reflexivity.
Qed.

(** ** Parts of a list *)

Lemma firstn_add : forall (A : Type) n m (l : list A), firstn (n + m) l = firstn n l ++ firstn m (skipn n l).
Proof. induction n as [|n IH]; simpl; intros m l; [reflexivity|]. destruct l; simpl; [rewrite firstn_nil; reflexivity|]. rewrite IH. reflexivity. Qed.

Lemma firstn_snoc : forall (A : Type) (l : list A) n x, nth_error l n = Some x -> firstn (S n) l = firstn n l ++ [x].
Proof.
  induction l as [|y l IH]; intros n x H; [destruct n; discriminate|]. destruct n; simpl in *; [injection H as ->; reflexivity|].
  f_equal. apply IH, H.
Qed.

Lemma skipn_more : forall (A : Type) n m (l : list A), skipn (n + m) l = skipn m (skipn n l).
Proof. induction n as [|n IH]; intros m l; simpl; [reflexivity|]. destruct l as [|x l]; [rewrite skipn_nil; reflexivity|apply IH]. Qed.

Lemma nth_error_of_firstn : forall (A : Type) n (l : list A) i x, nth_error (firstn n l) i = Some x -> i < n /\ nth_error l i = Some x.
Proof.
  intros A n l i x E. assert (L : i < length (firstn n l)) by (apply nth_error_Some; congruence). split; [rewrite firstn_length in L; lia|].
  rewrite <- (firstn_skipn n l), nth_error_app1 by exact L. exact E.
Qed.

Lemma nth_error_of_skipn : forall (A : Type) n (l : list A) j, nth_error (skipn n l) j = nth_error l (n + j).
Proof. induction n as [|n IH]; intros l j; [reflexivity|]. destruct l; [destruct j; reflexivity|]. simpl. apply IH. Qed.

Lemma nth_error_seq : forall n i, i < n -> nth_error (seq 0 n) i = Some i.
Proof. intros n i L. rewrite nth_error_nth' with (d := 0) by (rewrite seq_length; exact L). rewrite seq_nth by exact L. reflexivity. Qed.

Lemma nth_error_ext : forall (A : Type) (a b : list A), (forall i, nth_error a i = nth_error b i) -> a = b.
Proof.
  induction a as [|x a IH]; intros [|y b] H; [reflexivity|specialize (H 0); discriminate|specialize (H 0); discriminate|].
  pose proof (H 0) as E. injection E as ->. f_equal. apply IH. intros i. apply (H (S i)).
Qed.

Lemma numbered : forall (A : Type) (l : list A) i x, In (i, x) (combine (seq 0 (length l)) l) <-> nth_error l i = Some x.
Proof.
  intros A l i x. cut (forall k, In (i, x) (combine (seq k (length l)) l) <-> k <= i /\ nth_error l (i - k) = Some x).
  { intros C. rewrite C, Nat.sub_0_r. intuition lia. }
  induction l as [|y l IH]; simpl; intros k; [destruct (i - k); simpl; intuition discriminate|]. rewrite IH. split.
  - intros [E|[L Nh]]; [injection E as -> ->; rewrite Nat.sub_diag; auto|]. split; [lia|]. replace (i - k) with (S (i - S k)) by lia. exact Nh.
  - intros [L Nh]. destruct (Nat.eq_dec i k) as [->|D].
    + rewrite Nat.sub_diag in Nh. injection Nh as ->. auto.
    + right. split; [lia|]. replace (i - k) with (S (i - S k)) in Nh by lia. exact Nh.
Qed.

(** If [f] gives each element what [g] gives its position, mapping [f] is mapping [g] to the numbers from 0 on. *)
Lemma map_numbered : forall (A B : Type) (f : A -> B) (g : nat -> B) l, (forall i x, nth_error l i = Some x -> f x = g i) -> map f l = map g (seq 0 (length l)).
Proof.
  intros A B f g l P. apply nth_error_ext. intros i. rewrite !nth_error_map. destruct (nth_error l i) as [x|] eqn:E; simpl.
  - rewrite (P i x E), nth_error_seq by (apply nth_error_Some; congruence). reflexivity.
  - apply nth_error_None in E. rewrite (proj2 (nth_error_None _ _)); [reflexivity|rewrite seq_length; exact E].
Qed.

Lemma map_nth_all : forall (A : Type) (d : A) l, map (fun i => nth i l d) (seq 0 (length l)) = l.
Proof. intros A d l. rewrite <- (map_numbered _ _ (fun x => x)), map_id; [reflexivity|]. intros i x E. symmetry. apply nth_error_nth, E. Qed.

Lemma seq_part : forall n j m, j + m <= n -> firstn m (skipn j (seq 0 n)) = seq j m.
Proof.
  assert (X : forall (l k r : list nat), firstn (length k) (skipn (length l) (l ++ k ++ r)) = k)
    by (intros l k r; rewrite skipn_app, skipn_all, Nat.sub_diag; simpl; rewrite firstn_app, firstn_all, Nat.sub_diag; apply app_nil_r).
  intros n j m L. specialize (X (seq 0 j) (seq j m) (seq (j + m) (n - (j + m)))). rewrite !seq_length, <- !seq_app in X. replace n with (j + (m + (n - (j + m)))) by lia. exact X.
Qed.

(** ** Lists without repetitions *)

Lemma NoDup_first : forall (A : Type) (a b : list A), NoDup (a ++ b) -> NoDup a.
Proof. induction a as [|x a IH]; intros b D; [constructor|]. simpl in D. inversion D; subst. constructor; [|eapply IH; eauto]. intros I. apply H1, in_or_app. left. exact I. Qed.

Lemma NoDup_app_of : forall (A : Type) (a b : list A), NoDup a -> NoDup b -> (forall x, In x a -> ~ In x b) -> NoDup (a ++ b).
Proof.
  induction a as [|x a IH]; simpl; intros b Da Db H; [exact Db|]. inversion Da; subst. constructor; [|apply IH; auto; intros y Hy; apply H; right; exact Hy].
  rewrite in_app_iff. intros [I|I]; [contradiction|]. exact (H x (or_introl eq_refl) I).
Qed.

Lemma NoDup_by_key : forall (A : Type) (key : A -> nat) (f : nat -> list A) l, NoDup l -> (forall r, In r l -> NoDup (f r) /\ forall x, In x (f r) -> key x = r) ->
  NoDup (concat (map f l)).
Proof.
  intros A key f. induction l as [|r l IH]; simpl; intros D H; [constructor|]. inversion D as [|? ? Nr Dl]; subst. apply NoDup_app_of; [apply H; auto|apply IH; auto|].
  intros x I J. apply in_concat in J as [b [Ib Ix]]. apply in_map_iff in Ib as [q [<- Iq]]. apply Nr. rewrite <- (proj2 (H r (or_introl eq_refl)) x I), (proj2 (H q (or_intror Iq)) x Ix). exact Iq.
Qed.

Lemma filter_split : forall (A : Type) (f : A -> bool) l, Permutation (filter f l ++ filter (fun x => negb (f x)) l) l.
Proof.
  intros A f. induction l as [|x l IH]; [constructor|]. simpl. destruct (f x); simpl.
  - constructor. exact IH.
  - rewrite <- Permutation_middle. constructor. exact IH.
Qed.

Lemma filter_all : forall (A : Type) (f : A -> bool) (b : bool) l, (forall x, In x l -> f x = b) -> filter f l = if b then l else [].
Proof.
  intros A f b. induction l as [|x l IH]; intros H; simpl; [destruct b; reflexivity|]. rewrite (H x (or_introl eq_refl)), IH by (intros y I; apply H; right; exact I).
  destruct b; reflexivity.
Qed.

Lemma Permutation_filter : forall (A : Type) (f : A -> bool) l k, Permutation l k -> Permutation (filter f l) (filter f k).
Proof.
  induction 1 as [|x l k P IH|x y l|l k m P IH Q JH]; simpl; [constructor|destruct (f x); auto|destruct (f x), (f y); auto; constructor|eapply Permutation_trans; eauto].
Qed.

Lemma NoDup_filtered : forall (A B : Type) (f : A -> bool) (g : A -> list B) l, NoDup (flat_map g l) -> NoDup (flat_map g (filter f l)).
Proof.
  intros A B f g l D. apply (NoDup_first _ _ (flat_map g (filter (fun x => negb (f x)) l))). rewrite <- flat_map_app.
  exact (Permutation_NoDup (Permutation_flat_map g (Permutation_sym (filter_split A f l))) D).
Qed.

(** ** Sorting *)

Section Sort.
  Variables (A : Type) (before : A -> A -> bool).
  Fixpoint insert_by (x : A) (l : list A) : list A :=
    match l with
    | [] => [x]
    | y :: r => if before x y then x :: l else y :: insert_by x r
    end.
  (** Stable if [before] holds between equals. *)
  Definition sort_by (l : list A) : list A := fold_right insert_by [] l.
End Sort.
Arguments insert_by {A}.
Arguments sort_by {A}.

(** [before] is total and transitive. *)
Record orders {A} (before : A -> A -> bool) : Prop := {
  total_order : forall a b, before a b = false -> before b a = true;
  along_order : forall a b c, before a b = true -> before b c = true -> before a c = true }.

Lemma insert_by_perm : forall A (b : A -> A -> bool) x l, Permutation (insert_by b x l) (x :: l).
Proof.
  induction l as [|y l IH]; simpl; [auto|]. destruct (b x y); [auto|]. rewrite IH. apply perm_swap.
Qed.

Lemma sort_by_perm : forall A (b : A -> A -> bool) l, Permutation (sort_by b l) l.
Proof. induction l as [|x l IH]; simpl; [auto|]. rewrite insert_by_perm, IH. auto. Qed.

Lemma sort_by_length : forall A (b : A -> A -> bool) l, length (sort_by b l) = length l.
Proof. intros. apply Permutation_length, sort_by_perm. Qed.

Lemma sort_by_forall : forall A (b : A -> A -> bool) (P : A -> Prop) l, Forall P l -> Forall P (sort_by b l).
Proof. intros. eapply Forall_perm; [symmetry; apply sort_by_perm|assumption]. Qed.

Lemma sort_by_sorted : forall A (before : A -> A -> bool) l, orders before -> StronglySorted (fun a b => before a b = true) (sort_by before l).
Proof.
  intros A before l [To Al]. induction l as [|x l IH]; simpl; [constructor|]. induction IH as [|y r S IHr F]; simpl; [repeat constructor|].
  destruct (before x y) eqn:E.
  - constructor; [constructor; assumption|]. constructor; [exact E|]. eapply Forall_impl; [|exact F]. simpl. intros z. apply Al, E.
  - constructor; [exact IHr|]. eapply Forall_perm; [symmetry; apply insert_by_perm|]. constructor; [apply To, E|exact F].
Qed.

(** For comparisons of numbers, and what connectives join them to. *)
Ltac orders_numbers := split; intros *; rewrite ?orb_true_iff, ?orb_false_iff, ?andb_true_iff, ?andb_false_iff, ?Nat.ltb_lt, ?Nat.ltb_ge, ?Nat.leb_le, ?Nat.leb_gt,
  ?Nat.eqb_eq, ?Nat.eqb_neq; lia.

Lemma sorted_weaker : forall A (R Q : A -> A -> Prop) l, (forall x y, R x y -> Q x y) -> StronglySorted R l -> StronglySorted Q l.
Proof. induction 2 as [|x l S IH F]; constructor; [exact IH|]. eapply Forall_impl; [|exact F]. auto. Qed.

Lemma sorted_app : forall A (R : A -> A -> Prop) l m,
  StronglySorted R (l ++ m) <-> StronglySorted R l /\ StronglySorted R m /\ forall x y, In x l -> In y m -> R x y.
Proof.
  induction l as [|z l IH]; simpl; intros m; split.
  - intros S. repeat split; [constructor|exact S|easy].
  - tauto.
  - intros S. inversion S as [|? ? S1 S2]; subst. apply IH in S1 as [B1 [B2 B3]]. apply Forall_app in S2 as [S2 S3].
    split; [constructor; assumption|]. split; [exact B2|]. rewrite Forall_forall in S3. intros x y [->|Hx] Hy; [apply S3, Hy|apply B3; assumption].
  - intros [S [B C]]. inversion S as [|? ? S1 S2]; subst. constructor; [apply IH; auto|].
    apply Forall_app. split; [exact S2|]. apply Forall_forall. auto.
Qed.

Lemma sorted_rev : forall A (R : A -> A -> Prop) l, StronglySorted R l -> StronglySorted (fun x y => R y x) (rev l).
Proof.
  induction 1 as [|x l S IH F]; simpl; [constructor|]. apply sorted_app. split; [exact IH|]. split; [repeat constructor|].
  rewrite Forall_forall in F. intros a b Ia [<-|[]]. apply F, in_rev, Ia.
Qed.

(** ** Cutting into runs: the next element joins the current run if [joins] allows it, and otherwise begins a new one *)

Section Greedy.
Variables (A : Type) (joins : list A -> A -> bool).

Fixpoint greedy (run l : list A) : list (list A) :=
  match l with
  | [] => match run with [] => [] | _ => [run] end
  | x :: r => match run with
              | [] => greedy [x] r
              | _ => if joins run x then greedy (run ++ [x]) r else run :: greedy [x] r
              end
  end.

Lemma greedy_concat : forall l run, concat (greedy run l) = run ++ l.
Proof.
  induction l as [|x l IH]; intros [|y run]; simpl; rewrite ?app_nil_r; try reflexivity; [apply IH|].
  destruct (joins (y :: run) x); [rewrite IH; simpl; rewrite <- app_assoc; reflexivity|simpl; rewrite IH; reflexivity].
Qed.

(** A property that holds of each single element, and still holds of a run when an element joins it, holds of every run. [L] is the
    list that is cut. *)
Lemma greedy_keeps : forall (P : list A -> Prop) L, (forall x, In x L -> P [x]) ->
  (forall before run x after, L = before ++ run ++ x :: after -> P run -> joins run x = true -> P (run ++ [x])) ->
  forall l run before, L = before ++ run ++ l -> run = [] \/ P run -> Forall P (greedy run l).
Proof.
  intros P L One More. induction l as [|x l IH]; intros [|y run] before E H; try (destruct H; [discriminate|]); cbn [greedy]; auto.
  - apply (IH [x] before E). right. apply One. rewrite E. apply in_or_app. right. left. reflexivity.
  - destruct (joins (y :: run) x) eqn:J; [apply (IH _ before); [rewrite E, <- app_assoc; reflexivity|right; exact (More _ _ _ _ E H J)]|].
    constructor; [exact H|]. apply (IH [x] (before ++ y :: run)); [rewrite E, <- app_assoc; reflexivity|]. right. apply One.
    rewrite E. apply in_or_app. right. apply in_or_app. right. left. reflexivity.
Qed.

Lemma no_run_is_left_empty : forall l, Forall (fun g => g <> []) (greedy [] l).
Proof. intros l. apply (greedy_keeps _ l) with (before := []); auto; [discriminate|]. intros before [|y run] x after _ _ _; discriminate. Qed.

(** If every part of a good run is good, and an element joins whenever the run stays good, no cut into good runs has fewer runs. *)
Variable good : list A -> Prop.
Hypothesis good_part : forall g h k, good (g ++ h ++ k) -> good h.
Hypothesis joins_good : forall run x, run <> [] -> good (run ++ [x]) -> joins run x = true.

(** Greedy cutting is never behind. It makes no more runs of [l] than any other cut that has used as many runs so far, even if that
    cut's last run contains the whole current one and reaches further. *)
Lemma greedy_is_never_behind : forall l run, run <> [] ->
  (forall Q, Forall good Q -> concat Q = l -> length (greedy run l) <= S (length Q)) /\
  (forall earlier rest Q, Forall good Q -> l = rest ++ concat Q -> good (earlier ++ run ++ rest) -> length (greedy run l) <= S (length Q)).
Proof.
  induction l as [|x l IH]; intros run Nh; [destruct run; [easy|]; split; intros; simpl; lia|].
  assert (Loose : forall Q, Forall good Q -> concat Q = x :: l -> length (greedy run (x :: l)) <= S (length Q)).
  { induction Q as [|q Q IHQ]; intros F E; [discriminate|]. inversion F as [|? ? F1 F2]; subst. destruct q as [|y q].
    - specialize (IHQ F2 E). simpl in *. lia.
    - simpl in E. injection E as -> E. destruct run as [|a run]; [easy|]. cbn [greedy]. destruct (joins (a :: run) x).
      + (* the current run extends at least to the end of [q], so [q] needs no run of its own *)
        destruct (IH ((a :: run) ++ [x])) as [Lo _]; [destruct run; discriminate|].
        assert (Fq : good q) by (apply (good_part [x] q []); rewrite app_nil_r; exact F1). specialize (Lo (q :: Q) (Forall_cons _ Fq F2) E). simpl in *. lia.
      + destruct (IH [x]) as [_ T]; [discriminate|]. specialize (T [] q Q F2 (eq_sym E) F1). simpl. lia. }
  split; [exact Loose|]. intros earlier rest Q F E Fq. destruct rest as [|z rest]; [apply Loose; auto|].
  simpl in E. injection E as -> E. destruct run as [|a run]; [easy|]. cbn [greedy]. rewrite joins_good; [|discriminate|].
  - destruct (IH ((a :: run) ++ [z])) as [_ T]; [destruct run; discriminate|]. apply (T earlier rest Q F E). rewrite <- (app_assoc (a :: run)). exact Fq.
  - apply (good_part earlier _ rest). rewrite <- (app_assoc (a :: run)). exact Fq.
Qed.

Lemma no_good_runs_are_fewer : forall Q l, Forall good Q -> concat Q = l -> length (greedy [] l) <= length Q.
Proof.
  induction Q as [|q Q IH]; intros l F E; [subst; simpl; lia|]. inversion F as [|? ? F1 F2]; subst. destruct q as [|x q].
  - specialize (IH _ F2 eq_refl). simpl in *. lia.
  - destruct (greedy_is_never_behind (q ++ concat Q) [x]) as [_ T]; [discriminate|]. exact (T [] q Q F2 eq_refl F1).
Qed.
End Greedy.
Arguments greedy {A}.
