{{- define "octavo.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "octavo.image" -}}
{{ .root.Values.images.prefix }}/{{ .service }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}{{ .suffix }}
{{- end }}

{{- define "octavo.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "octavo.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where a container finds the settings that the values give its service. */}}
{{- define "octavo.settingsVolume" -}}
- name: settings
  configMap: {name: {{ include "octavo.name" . }}-settings}
{{- end }}

{{/* One secret setting, from the Secret that the values name. */}}
{{- define "octavo.secret" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.secrets.existing }}, key: {{ .key }}}
{{- end }}

{{/* Not empty if there is a Redis, and so a registry. */}}
{{- define "octavo.hasRegistry" -}}
{{ .Values.redis.url }}{{ .Values.redis.secret }}
{{- end }}

{{/* A setting that is the URL of that Redis. */}}
{{- define "octavo.redisUrl" -}}
- name: {{ .variable }}
  {{- if .root.Values.redis.secret }}
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.redis.secret }}, key: redis-url}
  {{- else }}
  value: {{ .root.Values.redis.url | quote }}
  {{- end }}
{{- end }}

{{/* Settings by which scheduler and KV manager take part in the registry. A pool is named by its pod. */}}
{{- define "octavo.member" -}}
{{- $prefix := printf "OCTAVO_%s" (upper .service) }}
{{- include "octavo.redisUrl" (dict "root" .root "variable" (printf "%s_REGISTRY" $prefix)) }}
- {name: {{ $prefix }}_REGISTRY_TTL_S, value: "3"}
- name: {{ $prefix }}_POOL_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: {{ $prefix }}_ADVERTISE, value: "grpc://$(POD_IP):{{ .port }}"}
{{- end }}

{{- define "octavo.tlsSecret" -}}
{{ get .root.Values.tls.secrets .service | default (printf "%s-%s-tls" (include "octavo.name" .root) .service) }}
{{- end }}

{{/* Settings of a service with a certificate, and its volume. */}}
{{- define "octavo.tlsEnv" -}}
{{- range $setting, $file := dict "CA" "ca.crt" "CERT" "tls.crt" "KEY" "tls.key" }}
- {name: OCTAVO_{{ upper $.service }}_LINK_{{ $setting }}, value: /etc/octavo-tls/{{ $file }}}
{{- end }}
{{- end }}

{{- define "octavo.tlsVolume" -}}
- name: {{ .service }}-tls
  secret: {secretName: {{ include "octavo.tlsSecret" . }}, defaultMode: 0440}
{{- end }}

{{- define "octavo.modelFolder" -}}
{{ if .Values.model.claim }}/models/{{ .Values.model.path }}{{ else }}/models/served{{ end }}
{{- end }}

{{/* The volume that holds the model. */}}
{{- define "octavo.modelVolume" -}}
- name: models
  {{- if .Values.model.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.sizeLimit }}}
  {{- end }}
{{- end }}

{{/* Fills that volume, unless a claim does. */}}
{{- define "octavo.modelInit" -}}
{{- if not .Values.model.claim }}
initContainers:
  - name: model
    image: {{ include "octavo.image" (dict "root" . "service" "model" "suffix" "") }}
    imagePullPolicy: {{ .Values.images.pullPolicy }}
    securityContext: {{- include "octavo.containerSecurity" . | nindent 6 }}
    env:
      - {name: OCTAVO_MODEL, value: {{ .Values.model.source | quote }}}
      - {name: PIP_INDEX_URL, value: {{ .Values.model.pipIndexUrl | quote }}}
    resources:
      requests: {cpu: 250m, memory: 512Mi}
      limits: {memory: 4Gi}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* Probes of a container. Startup and liveness ask whether the event loop turns, readiness whether it can serve. */}}
{{- define "octavo.probes" -}}
startupProbe:
  httpGet: {path: /health/live, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health/live, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /health/ready, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* All containers of a pod get SIGTERM at once; the scheduler needs the two others until it has drained, and removes
its socket when it ends. */}}
{{- define "octavo.outlivesScheduler" -}}
preStop:
  exec:
    command:
      - sh
      - -c
      - n=0; while [ -S /run/octavo/scheduler.sock ] && [ $n -lt {{ mul 2 (add . 2) }} ]; do sleep 0.5; n=$((n + 1)); done
{{- end }}
